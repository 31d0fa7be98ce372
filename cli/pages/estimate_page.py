"""The page of `zeroaccel estimate --html`: every plan beside the device's limit, and sliders.

The estimate of each slider position is made with the page: by a simulation, or by closed forms through a few
simulations (`zeroaccel.estimate.ClosedForms`); the page has the number of each. The script only looks up numbers, and
moves the bars that `estimate_page` has drawn for the requested workload.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from .frame import COLOURS, Table, bar, escaped, figure, legend, page

if TYPE_CHECKING:
    from zeroaccel.estimate import Capacity, Estimate, PlanRow, Workload

KINDS = ("params", "optimizer", "gradients", "activations")
_NAMES = {
    "params": "weights",
    "optimizer": "masters and states",
    "gradients": "gradients",
    "activations": "activations",
}
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 320, 640, 22, 10, 12


def positions(workload: Workload) -> list[Workload]:
    """Returns the workloads of the sliders, including the requested one."""
    choices = product(
        [workload.ranks * factor for factor in (1, 2, 4)],
        [workload.batch * factor for factor in (1, 4)],
        [workload.sequence * factor for factor in (1, 2)],
        (False, True),
    )
    return [
        replace(workload, ranks=count, batch=batch, sequence=sequence, checkpointing=again)
        for count, batch, sequence, again in choices
    ]


def estimate_page(
    title: str,
    model: str,
    workload: Workload,
    capacity: Capacity,
    tables: Sequence[Sequence[PlanRow]],
    simulated: int,
) -> str:
    """Returns the page of an estimate as HTML.

    Args:
        tables: for each of `positions` the rows of its `plan_table`.
        simulated: number of positions that were simulated directly.
    """
    at = positions(workload)
    order = [row.estimate.name for row in tables[at.index(workload)]]
    numbers = {
        _key(at_page): {row.estimate.name: _numbers(row, at_page) for row in rows}
        for at_page, rows in zip(at, tables, strict=True)
    }
    shown = numbers[_key(workload)]
    rows = tables[at.index(workload)]
    configs = {row.estimate.name: config_of(workload, row.estimate) for row in rows}
    best = next((row.estimate.name for row in rows if row.recommended), "")
    limit = _limit(workload, capacity)
    body = [
        _controls(workload),
        *_plans(shown, order, limit),
        "<h2>To train with the recommended plan</h2>",
        f'<p id="none"{" hidden" if best else ""}>No plan is recommended for this workload.</p>',
        f'<div id="start"{"" if best else " hidden"}><p>Save this as ds_config.json:</p>',
        f'<pre><code id="config">{escaped(_indented(configs.get(best, {})))}</code></pre>',
        f'<p><code id="launch">{escaped(launch_command(workload))}</code></p></div>',
        "<h2>To estimate again</h2>",
        f'<p><code id="command">{escaped(command(model, workload, capacity))}</code> '
        '<button id="copy" type="button" hidden>Copy</button> <span id="said" role="status"></span></p>',
    ]
    settings = {
        "tables": numbers,
        "order": order,
        "kinds": KINDS,
        "limit": limit or 0,
        "model": model,
        "rest": _rest(workload, capacity),
        "configs": configs,
        "local": workload.local_ranks if workload.ranks_per_machine else 0,
        "axes": _axes(workload),
        "left": _LEFT,
        "width": _WIDTH,
    }
    about = (
        f"A plan fits if a tenth of each memory stays free. Of the sliders' {len(at)} positions, {simulated} were "
        "simulated directly"
    )
    if simulated < len(at):
        about += (
            "; the others come from formulas in tokens, sequence and 1 / ranks that were fitted to simulations. One "
            "more simulation of every stage agreed with the formulas to a part in 10,000"
        )
    return page(title, body, about=f"{about}.", data=settings, script=_SCRIPT)


def chart_page(title: str, workload: Workload, capacity: Capacity, rows: Sequence[PlanRow]) -> str:
    """Returns the page of `--plot`, with the plans of one workload, as HTML."""
    shown = {row.estimate.name: _numbers(row, workload) for row in rows}
    return page(title, _plans(shown, list(shown), _limit(workload, capacity)))


def _limit(workload: Workload, capacity: Capacity) -> int | None:
    return capacity.host // workload.local_ranks if capacity.on_cpu and capacity.host else capacity.device


def _plans(shown: dict[str, list[object]], order: Sequence[str], limit: int | None) -> list[str]:
    return [
        _table(shown, order),
        "<h2>On the device, per rank, at the peak of a step</h2>",
        legend({_NAMES[kind]: colour for kind, colour in zip(KINDS, COLOURS, strict=False)}),
        _bars(shown, order, limit),
    ]


def command(model: str, workload: Workload, capacity: Capacity) -> str:
    """Returns the command line that estimates this workload with the same capacity.

    Example:
        >>> from zeroaccel.estimate import Capacity, Workload
        >>> command("7b", Workload(ranks=8, precision="fp32"), Capacity(device=80 * 10**9))[-55:]
        ' --precision fp32 --optimizer adam --device_memory 80GB'
    """
    again = " --checkpointing" if workload.checkpointing else ""
    sizes = f"--ranks {workload.ranks} --batch {workload.batch} --sequence {workload.sequence}"
    return f"zeroaccel estimate {model} {sizes}{again}{_rest(workload, capacity)}"


def config_of(workload: Workload, estimate: Estimate) -> dict[str, Any]:
    """Returns the JSON config of a plan, as `zeroaccel estimate --config` reads it; without the mesh and the model."""
    zero: dict[str, Any] = {"stage": estimate.stage}
    for key, device in (("offload_optimizer", estimate.offload_optimizer), ("offload_param", estimate.offload_param)):
        if device != "none":
            zero[key] = {"device": device} | ({"nvme_path": "NVME_PATH"} if device == "nvme" else {})
    if workload.early_updates and estimate.offload_optimizer == "cpu":
        zero["offload_optimizer"]["update_during"] = "backward"
    if workload.keeps_share and estimate.offload_optimizer != "none":
        key = "device_budget" if workload.device_budget else "ratio"
        zero["offload_optimizer"][key] = getattr(workload, key)
    if workload.frozen_weights:
        zero["frozen_weights"] = workload.frozen_weights
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_accumulation_steps": workload.accumulation,
        "zero_optimization": zero,
    }
    if workload.precision != "fp32":
        config[workload.precision] = {"enabled": True}
    if workload.checkpointing:
        config["activation_checkpointing"] = {"wrap_blocks": True}
    if workload.residual_masters:
        config["data_types"] = {"master_weights": "residual"}
    if workload.moments_dtype != "fp32":
        config["optimizer"] = {"type": workload.optimizer, "params": {"moments_dtype": workload.moments_dtype}}
    return config


def _indented(config: Mapping[str, Any]) -> str:
    """Returns the config as JSON with a line per section; the page's script writes the same."""
    lines = [f'  "{key}": {json.dumps(value)}' for key, value in config.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def launch_command(workload: Workload) -> str:
    """Returns the command that trains with the config on this mesh.

    Example:
        >>> from zeroaccel.estimate import Workload
        >>> launch_command(Workload(ranks=16, ranks_per_machine=8, tp=2))[17:]
        '--num_processes 16 --num_machines 2 --tp_size 2 --deepspeed_config_file ds_config.json train.py'
    """
    machines = workload.ranks // workload.local_ranks
    several = f" --num_machines {machines}" if machines > 1 else ""
    config = "--deepspeed_config_file ds_config.json"
    return f"zeroaccel launch --num_processes {workload.ranks}{several}{_axes(workload)} {config} train.py"


def _axes(workload: Workload) -> str:
    sizes = {axis: getattr(workload, axis) for axis in ("pp", "sp", "tp", "ep")}
    return "".join(f" --{axis}_size {size}" for axis, size in sizes.items() if size > 1)


def _rest(workload: Workload, capacity: Capacity) -> str:
    words = [f" --precision {workload.precision} --optimizer {workload.optimizer}"]
    words += [f" --accumulation {workload.accumulation}"] if workload.accumulation > 1 else []
    words += [f" --ranks_per_machine {workload.ranks_per_machine}"] if workload.ranks_per_machine else []
    words += [" --residual_masters"] if workload.residual_masters else []
    words += [" --early_updates"] if workload.early_updates else []
    words += [f" --ratio {workload.ratio}"] if workload.ratio < 1.0 else []
    words += [f" --moments_dtype {workload.moments_dtype}"] if workload.moments_dtype != "fp32" else []
    words += [" --peer_checkpoints"] if workload.peer_checkpoints else []
    words += [f" --lora_rank {workload.lora_rank}"] if workload.lora_rank else []
    words += [f" --frozen_weights {workload.frozen_weights}"] if workload.frozen_weights else []
    words += [_axes(workload)]
    words += [" --cpu"] if capacity.on_cpu else []
    sizes = {"device_memory": capacity.device, "host_memory": capacity.host, "disk": capacity.disk}
    sizes["device_budget"] = workload.device_budget
    words += [
        f" --{flag} {nbytes / 1e9:.9f}".rstrip("0").rstrip(".") + "GB" for flag, nbytes in sizes.items() if nbytes
    ]
    return "".join(words)


def _key(workload: Workload) -> str:
    return f"{workload.ranks}/{workload.batch}/{workload.sequence}/{int(workload.checkpointing)}"


def _numbers(row: PlanRow, workload: Workload) -> list[object]:
    """Returns bytes by kind, host and disk per machine, and the verdict."""
    estimate, local = row.estimate, workload.local_ranks
    kinds = [getattr(estimate.device, kind) for kind in KINDS]
    return [*kinds, estimate.host.total * local, estimate.disk.total * local, verdict(row, row.recommended)]


def verdict(row: PlanRow, recommended: bool) -> str:
    """Returns a word or two about the fit of a plan."""
    if row.fits is None:
        return "?"
    return "recommended" if recommended else "yes" if row.fits else f"no: {row.short_of}"


def _controls(workload: Workload) -> str:
    all_of = positions(workload)
    sliders = []
    for name in ("ranks", "batch", "sequence"):
        values = sorted({getattr(position, name) for position in all_of})
        at = values.index(getattr(workload, name))
        choices = ",".join(map(str, values))
        sliders.append(
            f'<label>{name}<input type="range" id="{name}" min="0" max="{len(values) - 1}" value="{at}" '
            f'data-values="{choices}" aria-valuetext="{values[at]}"><output for="{name}">{values[at]}</output></label>'
        )
    checked = " checked" if workload.checkpointing else ""
    sliders.append(f'<label><input type="checkbox" id="checkpointing"{checked}>recompute activations</label>')
    return f'<form class="controls" id="controls" hidden aria-label="Workload">{"".join(sliders)}</form>'


def _bars(shown: dict[str, list[object]], order: Sequence[str], limit: int | None) -> str:
    scale = _WIDTH / (max([_total(shown[name]) for name in order] + [limit or 0]) * 1.3 or 1)
    height = _TOP + len(order) * (_BAR + _GAP) + 26
    parts = []
    for index, name in enumerate(order):
        y, right = _TOP + index * (_BAR + _GAP), float(_LEFT)
        parts.append(f'<g class="plan"><text x="{_LEFT - 10}" y="{y + 16}" class="end">{escaped(name)}</text>')
        for kind, colour, nbytes in zip(KINDS, COLOURS, shown[name], strict=False):
            assert isinstance(nbytes, int)
            parts.append(bar(right, y, nbytes * scale, _BAR, colour, _NAMES[kind]))
            right += nbytes * scale
        said = f"{gb(_total(shown[name]))} GB{_mark(shown[name][6])}"
        parts.append(f'<text x="{right + 6:.1f}" y="{y + 16}">{said}</text></g>')
    if limit:
        at = _LEFT + limit * scale
        parts.append(f'<line id="limit" class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="2" y2="{height - 22}"/>')
        parts.append(f'<text id="limit-name" class="middle" x="{at:.1f}" y="{height - 6}">{gb(limit)} GB</text>')
    return figure(
        "".join(parts), _LEFT + _WIDTH + 20, height, "Memory on the device by plan; the table has the numbers", "bars"
    )


def _table(shown: dict[str, list[object]], order: Sequence[str]) -> str:
    headings = ["plan", *(_NAMES[kind] for kind in KINDS), "total", "host", "disk", "fits"]
    rows = [
        [name, *(gb(size) for size in (*shown[name][:4], _total(shown[name]), *shown[name][4:6])), shown[name][6]]
        for name in order
    ]
    best = next((index for index, name in enumerate(order) if shown[name][6] == "recommended"), None)
    caption = "GB: on the device per rank, on host and disk per machine"
    return Table(caption, headings, rows, texts=(0, 8), best=best, identity="plans").html()


def _mark(fits: object) -> str:
    return "" if fits == "?" else f", {fits}" if fits != "yes" else ", fits"


def _total(numbers: Sequence[object]) -> int:
    return sum(size for size in numbers[:4] if isinstance(size, int))


def gb(nbytes: object) -> str:
    """Formats a number of bytes in GB."""
    assert isinstance(nbytes, int)
    if not nbytes:
        return "-"
    return f"{nbytes / 1e9:.3f}" if nbytes < 1e9 else f"{nbytes / 1e9:.1f}"


_SCRIPT = """
const at=id=>document.getElementById(id),gb=n=>!n?'-':(n/1e9).toFixed(n<1e9?3:1),controls=at('controls');
const mark=f=>f==='?'?'':', '+(f==='yes'?'fits':f);
const value=id=>{const s=at(id);return s.dataset.values.split(',')[s.value]};
function show(){
  for(const id of ['ranks','batch','sequence']){const v=value(id);at(id).setAttribute('aria-valuetext',v);
    controls.querySelector('output[for='+id+']').textContent=v}
  const again=at('checkpointing').checked,key=[value('ranks'),value('batch'),value('sequence'),again?1:0].join('/');
  const plans=data.tables[key],total=p=>p[0]+p[1]+p[2]+p[3];
  const most=Math.max(data.limit,...data.order.map(n=>total(plans[n])))*1.3||1,scale=data.width/most;
  document.querySelectorAll('#bars .plan').forEach((g,i)=>{
    const p=plans[data.order[i]];let x=data.left;
    g.querySelectorAll('rect').forEach((r,k)=>{r.setAttribute('x',x);r.setAttribute('width',p[k]*scale);x+=p[k]*scale});
    const t=g.querySelectorAll('text')[1];t.setAttribute('x',x+6);t.textContent=gb(total(p))+' GB'+mark(p[6])});
  if(data.limit){const x=data.left+data.limit*scale,l=at('limit');l.setAttribute('x1',x);l.setAttribute('x2',x);
    at('limit-name').setAttribute('x',x)}
  document.querySelectorAll('#plans tbody tr').forEach((row,i)=>{
    const p=plans[data.order[i]],cells=row.querySelectorAll('td');
    [p[0],p[1],p[2],p[3],total(p),p[4],p[5]].forEach((n,k)=>cells[k].textContent=gb(n));
    cells[7].textContent=p[6];row.className=p[6]==='recommended'?'best':''});
  const best=data.order.find(n=>plans[n][6]==='recommended'),machines=data.local?value('ranks')/data.local:1;
  at('none').hidden=!!best;at('start').hidden=!best;
  if(best){const c={...data.configs[best],train_micro_batch_size_per_gpu:+value('batch')};
    delete c.activation_checkpointing;if(again)c.activation_checkpointing={wrap_blocks:true};
    const spaced=v=>JSON.stringify(v,null,1).replace(/\\n\\s*/g,' ').replace(/([{\\[]) /g,'$1')
      .replace(/ ([}\\]])/g,'$1');
    at('config').textContent='{\\n'+Object.entries(c).map(([k,v])=>'  "'+k+'": '+spaced(v)).join(',\\n')+'\\n}';
    at('launch').textContent='zeroaccel launch --num_processes '+value('ranks')
      +(machines>1?' --num_machines '+machines:'')+data.axes+' --deepspeed_config_file ds_config.json train.py'}
  at('command').textContent='zeroaccel estimate '+data.model+' --ranks '+value('ranks')+' --batch '+value('batch')
    +' --sequence '+value('sequence')+(again?' --checkpointing':'')+data.rest;
}
controls.hidden=false;controls.addEventListener('input',show);
const copy=at('copy');
if(navigator.clipboard){copy.hidden=false;copy.addEventListener('click',()=>
  navigator.clipboard.writeText(at('command').textContent).then(()=>at('said').textContent='copied'))}
"""
