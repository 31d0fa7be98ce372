// Two CUDA or XPU devices for a torch that was built without them: a stream is a number, and an event is a number that
// represents a moment of a stream. They execute nothing. Autograd, FakeTensorMode and torch's stream guards then work
// on tensors of these devices as in a build with them. The stream model sets two functions, which the library calls
// when an event is recorded and when a stream waits for one. As with CUDA, each thread begins on device 0, and has a
// current stream per device.
//
// Load the library before importing torch: torch looks up the hooks of an accelerator once, at the first query.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdint>

namespace {

using EventReport = void (*)(int64_t event, int64_t device, int64_t stream);

constexpr c10::DeviceIndex kDevices = 2;
c10::DeviceType kind = c10::DeviceType::CUDA;
thread_local c10::DeviceIndex device_of_thread = 0;
thread_local int64_t stream_of_thread[kDevices] = {0, 0};
std::atomic<int64_t> last_event{0};
std::atomic<EventReport> recorded{nullptr};
std::atomic<EventReport> awaited{nullptr};

c10::Device numbered(c10::DeviceIndex index) {
  return c10::Device(kind, index);
}

// A device without an index means the thread's current device.
c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : device_of_thread;
}

c10::Stream numbered(c10::DeviceIndex device, int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, numbered(device), number);
}

c10::DeviceIndex exchange(c10::DeviceIndex next) {
  const auto before = device_of_thread;
  if (next >= 0) {
    device_of_thread = next;
  }
  return before;
}

class Devices final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kind; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override { return numbered(device_of_thread); }
  c10::Device exchangeDevice(c10::Device next) const override { return numbered(exchange(next.index())); }
  void setDevice(c10::Device next) const override { exchange(next.index()); }
  void uncheckedSetDevice(c10::Device next) const noexcept override { exchange(next.index()); }

  c10::Stream getStream(c10::Device device) const override {
    return numbered(index_of(device), stream_of_thread[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return numbered(index_of(device), 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto device = index_of(next.device());
    const auto before = stream_of_thread[device];
    stream_of_thread[device] = next.id();
    return numbered(device, before);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = reinterpret_cast<void*>(++last_event);
    }
    if (const auto report = recorded.load()) {
      report(reinterpret_cast<int64_t>(*event), stream.device_index(), stream.id());
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto report = awaited.load();
    if (event != nullptr && report) {
      report(reinterpret_cast<int64_t>(event), stream.device_index(), stream.id());
    }
  }

  // All queries find the work completed: Python counts the waits of the host.
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

template <class Interface>
struct DeviceHooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return device_of_thread; }
  c10::DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex next) const override { return exchange(next); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex next) const override { return exchange(next); }
  void setCurrentDevice(c10::DeviceIndex next) const override { exchange(next); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

struct CudaHooks final : DeviceHooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return kDevices; }
};

struct XpuHooks final : DeviceHooks<at::XPUHooksInterface> {
  bool hasXPU() const override { return true; }
  c10::DeviceIndex getNumGPUs() const override { return kDevices; }
};

}  // namespace

extern "C" {
// Call it once, before torch is imported.
void register_devices(bool are_xpu) {
  if (are_xpu) {
    kind = c10::DeviceType::XPU;
    at::XPUHooksRegistry()->Register("XPUHooks", [](auto&&...) -> std::unique_ptr<at::XPUHooksInterface> {
      return std::make_unique<XpuHooks>();
    });
  } else {
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](auto&&...) -> std::unique_ptr<at::CUDAHooksInterface> {
      return std::make_unique<CudaHooks>();
    });
  }
  static const c10::impl::DeviceGuardImplRegistrar registrar(kind, new Devices());
}
int64_t current_device() { return device_of_thread; }
void set_current_device(int64_t device) { exchange(static_cast<c10::DeviceIndex>(device)); }
int64_t current_stream(int64_t device) { return stream_of_thread[device]; }
void set_current_stream(int64_t device, int64_t number) { stream_of_thread[device] = number; }
void report_events(EventReport on_record, EventReport on_wait) {
  recorded = on_record;
  awaited = on_wait;
}
}
