// Browsers start no worker from file://. This replacement runs the worker's script in a hidden frame, which shares the
// page's origin, so that the site's search works from a folder. Pages from a server use the browser's own Worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      this.loaded = new Promise((resolve) => (script.onload = resolve));
      script.src = url;
      frame.contentDocument.body.append(script);
      this.inside = inside;
      this.frame = frame;
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
