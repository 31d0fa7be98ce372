// On the page of models: a filter above the table, and the command of the chosen row.
document.addEventListener("DOMContentLoaded", () => {
  const table = [...document.querySelectorAll("table")].find((found) => found.tHead?.innerText.includes("141 GB"));
  if (!table) return;
  const rows = [...table.tBodies[0].rows];
  const text = (row, column) => row.cells[column].textContent.trim();
  const form = document.createElement("form");
  const choices = ["model", "method", "GPUs"].map((name, column) => {
    const label = document.createElement("label");
    const select = document.createElement("select");
    const values = [...new Set(rows.map((row) => text(row, column)))];
    select.append(new Option("all", ""), ...values.map((value) => new Option(value)));
    label.append(`${name} `, select, " ");
    form.append(label);
    return select;
  });
  const size = document.createElement("select");
  size.append(...[...table.tHead.rows[0].cells].slice(3).map((cell) => new Option(cell.textContent)));
  const memory = document.createElement("label");
  memory.append("memory of a GPU, for the command ", size);
  form.append(memory);
  const command = document.createElement("code");
  const line = document.createElement("p");
  line.setAttribute("role", "status");
  line.append(command);
  (table.closest(".md-typeset__scrollwrap") ?? table).before(form, line);
  const show = () => {
    const shown = rows.filter((row) => {
      row.hidden = choices.some((select, column) => select.value && select.value !== text(row, column));
      return !row.hidden;
    });
    if (!shown.length) return;
    const [model, method, gpus] = [0, 1, 2].map((column) => text(shown[0], column));
    const codes = model.startsWith("gpt-oss") ? "mxfp4" : "nf4";
    command.textContent =
      `zeroaccel estimate ${model} --ranks ${gpus} --batch 1 --sequence 2048 --checkpointing --precision bf16 --optimizer adam` +
      (method === "full" ? "" : " --lora_rank 16") +
      (method === "QLoRA" ? ` --frozen_weights ${codes}` : "") +
      ` --device_memory ${size.value.replace(" ", "")} --host_memory 512GB --disk 2000GB`;
  };
  form.addEventListener("change", show);
  show();
});
