"""One row per setting of a launch: its value, its names everywhere, its question, and who reads it.

Everything that knows settings derives from these rows: flags and their help (`zeroaccel.cli.launch.launch_command`),
the model of the launch file (`launch_settings`), the variables that the launcher reads and passes to ranks
(`launch_sources`), the comparison with a JSON config (`resolution`), the arguments of `ZeroPlugin`, the questions of
`zeroaccel config`, its `explain` and `convert`, and the tables of the documentation. A new setting is a new row.

The rows are in the order of the questions; help lists them in this order within each group.
"""

from __future__ import annotations

from typing import Any

from zeroaccel.config.launch.setting import Ask, Choice, Kind, Setting

PROCESSES, MACHINES, COMPILATION, OUTPUT = "Processes", "Machines", "Compilation", "Output and errors"
TRAINING = "Precision and ZeRO, if the script does not set them"
MESH = "Parallelism beyond ZeRO"
GROUP_ORDER = (PROCESSES, MACHINES, TRAINING, MESH, COMPILATION, OUTPUT)
"""The headings of help, in order."""

ZERO_SECTION, DYNAMO_SECTION, MESH_SECTION = "deepspeed_config", "dynamo_config", "parallelism_config"
MESH_SIZES = ("tp_size", "sp_size", "pp_size", "ep_size")

_DEVICES = ("none", "cpu", "nvme")
_WITH_MPI = "leave it out, and start `zeroaccel launch` under mpirun or srun"
_ON_NVME = "on nvme. [default: on the writable local disk with the most free space]"
_TIERS = (
    Choice("none", "on the device"),
    Choice("cpu", "in host memory"),
    Choice("nvme", "in files on a local disk", "no_disk"),
)


def _host(name: str, kind: Kind, about: str, short: str = "", **more: Any) -> Setting:
    """Makes a row about the machines of a hostfile."""
    spelled = (*more.pop("spelled", ()), f"deepspeed_{name}")
    return Setting(name, kind, MACHINES, about, short=short, spelled=spelled, section=ZERO_SECTION, **more)


def _zero(name: str, kind: Kind, about: str, key: str = "", **more: Any) -> Setting:
    """Makes a row of ZeRO; `key` is its path in the JSON config."""
    takes_value = kind == "switch"
    more = {"rank_variable": f"ACCELERATE_DEEPSPEED_{name.removeprefix('deepspeed_').upper()}", **more}
    section = ZERO_SECTION
    return Setting(name, kind, TRAINING, about, takes_value=takes_value, json_path=key, section=section, **more)


def _mesh(name: str, kind: Kind, about: str, *, in_accelerate: bool = True, **more: Any) -> Setting:
    """Makes a row about the mesh."""
    spelled = (f"parallelism_config_{name}",) if in_accelerate else ()
    variable = f"PARALLELISM_CONFIG_{name.upper()}"
    return Setting(
        name, kind, MESH, about, spelled=spelled, section=MESH_SECTION, rank_variable=variable, **more
    )  # fmt: skip


def _size(axis: str, about: str, words: str, when: str = "", *, in_accelerate: bool = True) -> Setting:
    """Makes a row about the size of an axis that `zeroaccel config` asks for."""
    ask = Ask(words, f"processes mesh {when}", 1, check="mesh")
    return _mesh(f"{axis}_size", "count", f"Number of {about} [default: 1]", in_accelerate=in_accelerate, ask=ask)


def _dynamo(name: str, kind: Kind, about: str, **more: Any) -> Setting:
    """Makes a row of torch.compile."""
    variable = f"ACCELERATE_{name.upper()}"
    return Setting(name, kind, COMPILATION, about, section=DYNAMO_SECTION, rank_variable=variable, **more)


_ROWS = (
    # -- processes and machines
    Setting(
        "use_cpu", "switch", PROCESSES,
        "Hide the accelerators: the processes compute on the CPU and communicate through gloo.", False, flag="--cpu",
        rank_variable="ACCELERATE_USE_CPU",
        ask=Ask("Run on the CPU only (yes if there are no accelerators)?", computed="no_devices"),
    ),
    Setting(
        "num_machines", "count", MACHINES,
        "Number of machines; run the command on each, with its --machine_rank. MIN:MAX with c10d. [default: 1]", 1,
        same={"num_nodes": "; with a hostfile, use its first N machines"},
        ask=Ask("How many machines will you use?", default=1),
    ),
    Setting(
        "min_machines", "count", MACHINES,
        "With c10d, fewest machines to start with, and to continue with if others fail. [default: all of them]",
    ),
    _host(
        "multinode_launcher", "choice",
        "Transport to the other machines: ssh, or standard (you run the command on each). [default: ssh]",
        choices=("ssh", "standard"), synonyms={"pdsh": "ssh", "nossh": "standard"},
        refused=dict.fromkeys(("openmpi", "mpich", "impi", "mvapich", "slurm"), _WITH_MPI),
        means={"no_ssh": "standard"},
        ask=Ask("How is the job started on the other machines?", "several",
            choices=(Choice("standard", "you run the command on each"),
            Choice("ssh", "from this one, by ssh and a hostfile"))),
    ),
    _host(
        "hostfile", "file",
        "File with one line per machine, such as: node1 slots=8. This launcher starts the job on all of them.", "-H",
        ask=Ask("Where is the hostfile?", "several by_ssh"),
    ),
    _host(
        "exclusion_filter", "text", "Machines and devices of the hostfile to exclude, such as node1:3.", "-e",
        spelled=("exclude",), metavar="HOSTS",
        ask=Ask("Which hostfile entries are excluded (node1:3)?", "several by_ssh",
            gate="Exclude some machines or devices of the hostfile?"),
    ),
    _host(
        "inclusion_filter", "text", "Machines and devices of the hostfile to use, such as node1@node2:0,2.", "-i",
        spelled=("include",), metavar="HOSTS",
        ask=Ask("Which hostfile entries are used (node1@node2:0,2)?", "several by_ssh not_filtered",
            gate="Use only some machines or devices of the hostfile?"),
    ),
    Setting(
        "machine_rank", "count", MACHINES, "Number of this machine, from 0. Machine 0 hosts the rendezvous.",
        from_zero=True, same={"node_rank": ""},
        ask=Ask("What is the rank of this machine, counted from 0?", "several each", 0, check="rank_exists"),
    ),
    Setting(
        "main_process_ip", "text", MACHINES, "Address at which the other machines reach machine 0.", metavar="HOST",
        same={"master_addr": ""},
        ask=Ask("What is the network address of machine 0?", "several", check="address"),
    ),
    Setting(
        "main_process_port", "port", MACHINES,
        "Port on machine 0 for the rendezvous. [default: a free port on one machine, 29500 on several]",
        metavar="PORT", same={"master_port": ""},
        ask=Ask("Which port of machine 0 is for the rendezvous?", "several", 29500, check="port"),
    ),
    Setting(
        "rdzv_backend", "choice", MACHINES,
        "Rendezvous backend: static (fixed ranks) or c10d. [default: c10d on one machine, static on several]",
        choices=("static", "c10d"),
    ),
    Setting(
        "rdzv_conf", "pairs", MACHINES,
        "Rendezvous settings as KEY=VALUE,...: timeout (static), join_timeout, ... (c10d), in seconds.",
        metavar="KEY=VALUE,...",
    ),
    Setting(
        "same_network", "switch", MACHINES,
        "Accepted without effect: the rendezvous is always at the address and port of machine 0.", True,
        reader="nothing",
    ),
    Setting(
        "num_processes", "count", PROCESSES,
        "Number of processes in the job; MIN:MAX on one machine. [default: one per accelerator, else 1 per machine]",
        ask=Ask("How many processes run in total?", computed="processes", check="divisible"),
    ),
    Setting(
        "min_processes", "count", PROCESSES,
        "With max_restarts, fewest processes to continue with after one has failed twice. [default: all of them]",
    ),
    Setting(
        "gpu_ids", "devices", PROCESSES,
        "Devices of this machine to use, such as 0,2. [default: all that CUDA_VISIBLE_DEVICES lists]", "all",
        metavar="IDS",
    ),
    Setting(
        "num_cpu_threads_per_process", "count", PROCESSES,
        "OMP_NUM_THREADS of each process. [default: cores of the machine divided by its processes]",
    ),
    Setting(
        "enable_cpu_affinity", "switch", PROCESSES, "Bind each process to its own block of adjacent cores.", False,
        means={"bind_cores_to_rank": True},
    ),
    Setting(
        "numa_affinity", "switch", PROCESSES,
        "Bind each process to the cores and memory of its GPU's NUMA node. [default: if there are several nodes]", True,
    ),
    Setting(
        "expandable_segments", "switch", PROCESSES,
        "Set expandable_segments in PyTorch's allocator. [default: on NVIDIA GPUs, unless the environment sets it]",
        True,
    ),
    Setting(
        "max_restarts", "count", PROCESSES, "Maximum number of restarts of all processes after failures. [default: 0]",
        0, from_zero=True,
    ),
    Setting(
        "monitor_interval", "number", PROCESSES,
        "Interval in seconds at which the launcher checks its processes. [default: 0.1]", 0.1, metavar="SECONDS",
    ),
    Setting(
        "shutdown_timeout", "number", PROCESSES,
        "Seconds that the processes have to exit after Ctrl-C or SIGTERM before they are killed. [default: 30]", 30.0,
        from_zero=True, metavar="SECONDS", variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    ),
    # -- precision, ZeRO and meshes
    Setting(
        "engine", "choice", TRAINING,
        "Package that `import deepspeed` loads in the processes. [default: deepspeed if installed, else zeroaccel]",
        choices=("zeroaccel", "deepspeed"),
    ),
    Setting(
        "distributed_type", "choice", TRAINING,
        "DEEPSPEED for the ZeRO engine; MULTI_GPU, MULTI_CPU or NO without it. [default: DEEPSPEED if ZeRO is set up]",
        choices=("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED"), expected="DEEPSPEED, MULTI_GPU, MULTI_CPU or NO",
        refused={"fsdp": "pass --use_fsdp, which sets the equivalent ZeRO stage"},
        means={"use_deepspeed": "DEEPSPEED", "multi_gpu": "MULTI_GPU"},
    ),
    Setting(
        "use_zero", "switch", "", "Train with ZeRO rather than plain data parallelism.",
        rank_variable="ACCELERATE_USE_DEEPSPEED", question="use_deepspeed",
        ask=Ask("Shard the training with ZeRO, as DeepSpeed does?", default=True),
    ),
    _zero(
        "deepspeed_config_file", "file",
        'Config in DeepSpeed\'s JSON format. The settings below then only fill keys that it omits or sets to "auto".',
        rank_variable="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        ask=Ask("Where is the JSON config?", "zero", gate="Do you have a JSON config in DeepSpeed's format?",
            check="json"),
    ),
    Setting(
        "mixed_precision", "choice", TRAINING,
        "Precision of the model: no (fp32), fp16 or bf16. [default: the JSON config's, else no]",
        choices=("no", "fp16", "bf16"), rank_variable="ACCELERATE_MIXED_PRECISION", fact="precision",
        ask=Ask("Which precision?", "open", computed="precision",
            choices=(Choice("no", "fp32"), Choice("fp16"), Choice("bf16", "", "no_bf16"))),
    ),
    Setting(
        "use_parallelism_config", "switch", "", "Apply the sizes of the mesh.",
        rank_variable="ACCELERATE_USE_PARALLELISM_CONFIG",
        ask=Ask("Use tensor, sequence, pipeline or expert parallelism?", "processes open_mesh", False),
    ),
    _size(
        "tp", "processes that share each layer (tensor parallelism).",
        "How many processes share each layer (tensor parallel)?",
    ),
    _size(
        "sp", "processes that share each sequence, also under its other name cp_size.",
        "How many processes share each sequence (sp, cp)?",
    ),
    _size(
        "pp", "pipeline stages, each on its own processes.", "How many stages does the pipeline have?",
        in_accelerate=False,
    ),
    _size(
        "ep", "processes that divide the experts of each layer; each has its own samples.",
        "Over how many processes are MoE experts divided?", "own_experts", in_accelerate=False,
    ),
    _mesh("dp_replicate_size", "count", "Number of groups of processes that each hold one sharded model. [default: 1]"),
    _mesh(
        "dp_shard_size", "count",
        "Data-parallel processes per group; with one group, 1 means the default. [default: processes / other sizes]",
    ),
    _mesh(
        "sp_seq_length", "count",
        "Tokens per sequence if all are equally long. Only accelerate reads it; zeroaccel takes any lengths.",
        reader="accelerate",
    ),
    _mesh(
        "sp_seq_length_is_variable", "switch",
        "True if sequences differ in length. Only accelerate reads it; zeroaccel takes any lengths.", takes_value=True,
        reader="accelerate",
    ),
    _mesh(
        "sp_attn_implementation", "text",
        "Attention implementation, such as sdpa. Only accelerate reads it; zeroaccel uses the model's own.",
        metavar="NAME", reader="accelerate",
    ),
    _zero(
        "zero_stage", "choice",
        "ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters; 0 shards nothing. [default: 2]",
        "zero_optimization.stage", choices=(0, 1, 2, 3), expected="0, 1, 2 or 3", fact="stage", unresolved=2,
        ask=Ask("Which stage of ZeRO?", "zero open", 2, choices=(Choice(0, "nothing is sharded"),
            Choice(1, "optimizer states"), Choice(2, "optimizer states and gradients"),
            Choice(3, "optimizer states, gradients and parameters"))),
    ),
    _zero(
        "offload_optimizer_device", "choice",
        "Storage of the optimizer states, from stage 1 on: none (the device), cpu or nvme. [default: none]",
        "zero_optimization.offload_optimizer.device", choices=_DEVICES, unresolved="none",
        ask=Ask("Where are optimizer states stored?", "zero open states", choices=_TIERS),
    ),
    _zero(
        "offload_param_device", "choice",
        "Storage of the parameters, at stage 3: none (the device), cpu or nvme. [default: none]",
        "zero_optimization.offload_param.device", choices=_DEVICES, unresolved="none",
        ask=Ask("Where are parameters stored between uses?", "zero open params", choices=_TIERS),
    ),
    _zero(
        "offload_param_nvme_path", "folder", f"Folder for parameters {_ON_NVME}",
        "zero_optimization.offload_param.nvme_path", fact="offload_param_path",
        ask=Ask("In which local folder are parameters stored?", "zero on_params_disk", computed="disk"),
    ),
    _zero(
        "offload_optimizer_nvme_path", "folder", f"Folder for optimizer states {_ON_NVME}",
        "zero_optimization.offload_optimizer.nvme_path", fact="offload_optimizer_path",
        ask=Ask("In which local folder are optimizer states stored?", "zero on_states_disk", computed="disk"),
    ),
    _zero(
        "zero_hpz_partition_size", "count",
        "At stage 3, ranks per group that holds a second copy of all shards (ZeRO++ hpZ). [default: 1, no copy]",
        "zero_optimization.zero_hpz_partition_size", fact="hpz_partition_size",
        ask=Ask("How many processes share a second copy of weights?", "zero open params several",
            computed="processes_of_a_machine", gate="Keep a second copy of weights on each machine (ZeRO++ hpZ)?",
            check="divides_processes"),
    ),
    _zero(
        "zero_quantized_weights", "switch",
        "At stage 3, gather parameters as 8-bit integers (ZeRO++ qwZ). [default: false]",
        "zero_optimization.zero_quantized_weights", fact="quantized_weights",
        ask=Ask("Gather weights as 8-bit integers (ZeRO++ qwZ)?", "zero open params several whole_layers", False),
    ),
    _zero(
        "zero_quantized_gradients", "switch",
        "At stage 3, reduce gradients between machines as 4-bit integers (ZeRO++ qgZ). [default: false]",
        "zero_optimization.zero_quantized_gradients", fact="quantized_gradients",
        ask=Ask("Reduce gradients between machines as 4-bit integers (ZeRO++ qgZ)?",
            "zero open params several whole_layers", False),
    ),
    _zero(
        "gradient_accumulation_steps", "count", "Number of micro-batches per optimizer step. [default: the script's]",
        "gradient_accumulation_steps", rank_variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS", fact="accumulation",
        ask=Ask("How many gradient accumulation steps (or auto)?", "zero open", computed="steps", takes_auto=True),
    ),
    _zero(
        "gradient_clipping", "number",
        "Maximum global norm of the gradients; 0 disables clipping. [default: the script's]", "gradient_clipping",
        from_zero=True, metavar="NORM", rank_variable="ACCELERATE_GRADIENT_CLIPPING", fact="clipping",
        ask=Ask("To which maximum norm are gradients clipped?", "zero open", 1.0, gate="Clip gradients?"),
    ),
    _zero(
        "peak_tflops", "number",
        "TFLOPS that a device can do, for the MFU in log lines and trackers. [default: by the device's name]",
        "peak_tflops", metavar="TFLOPS",
    ),
    _zero(
        "frozen_weights", "choice",
        "Quantize a frozen base model under LoRA: int8, nf4, mxfp4, or codes of its checkpoint. [default: none]",
        "zero_optimization.frozen_weights", choices=("int8", "nf4", "mxfp4", "codes"),
        ask=Ask("In which format are frozen weight matrices stored?", "zero open whole_layers whole_experts",
            gate="Train adapters on a frozen base model that is quantized?",
            choices=(Choice("nf4", "0.56 bytes per value"), Choice("mxfp4", "0.53 bytes"), Choice("int8", "1 byte"))),
    ),
    _zero(
        "zero3_save_16bit_model", "switch", "Gather the whole model when it is saved, at stage 3. [default: false]",
        "zero_optimization.gather_16bit_weights_on_model_save", fact="save_16bit_weights", unresolved=False,
        ask=Ask("Gather the whole model when it is saved?", "zero open params", False),
    ),
    _zero(
        "zero3_init_flag", "switch", "Shard parameters while the model is being built, at stage 3. [default: false]",
        rank_variable="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        ask=Ask("Shard large models while they are being built (zero.Init)?", "zero params", True),
    ),
    _zero(
        "deepspeed_moe_layer_cls_names", "names",
        "Classes of mixture-of-experts layers, separated by commas; the engine gathers each layer as a whole.",
        "zero_optimization.leaf_module.classes", metavar="CLASS,...",
        ask=Ask("Which classes are mixture-of-experts layers (A,B)?", "zero open params",
            gate="Are there mixture-of-experts layers to gather as a whole?"),
    ),
    Setting(
        "train_micro_batch_size_per_gpu", "count", "", "Samples per rank and micro-step, if no loader is prepared.",
        json_path="train_micro_batch_size_per_gpu", fact="micro_batch_size",
    ),
    # -- compilation
    _dynamo(
        "dynamo_backend", "word", "Backend of torch.compile, such as inductor; no disables compilation. [default: no]",
        metavar="NAME",
        ask=Ask("Which backend does torch.compile use?", gate="Compile the model with torch.compile (dynamo)?",
            choices=tuple(map(Choice, ("inductor", "eager", "aot_eager", "cudagraphs", "onnxrt", "tvm")))),
    ),
    _dynamo(
        "dynamo_mode", "choice", "Mode of torch.compile: default, reduce-overhead or max-autotune.",
        choices=("default", "reduce-overhead", "max-autotune"),
        ask=Ask("Which mode does torch.compile use?", "compiled"),
    ),
    _dynamo(
        "dynamo_use_fullgraph", "switch", "Raise an error at a graph break.", default=False,
        ask=Ask("Raise an error at a graph break?", "compiled", False),
    ),
    _dynamo(
        "dynamo_use_dynamic", "switch", "Compile for dynamic shapes.", default=False,
        ask=Ask("Compile for changing shapes?", "compiled", False),
    ),
    _dynamo(
        "dynamo_use_regional_compilation", "switch", "Compile the repeated blocks instead of the whole model.",
        default=False,
        ask=Ask("Compile repeated blocks rather than the whole model?", "compiled", False),
    ),
    # -- output and errors
    Setting(
        "role", "text", OUTPUT, "Name of the processes in output and logs. [default: rank]", "rank", metavar="NAME",
    ),
    Setting(
        "log_dir", "folder", OUTPUT, "Folder for the output and the error reports of every process.", metavar="FOLDER",
    ),
    Setting(
        "tee", "streams", OUTPUT,
        "Also write output to files: 1 stdout, 2 stderr, 3 both, or per local rank: 0:3,1:2. Prefixes each line.", 0,
        metavar="STREAMS", short="-t",
    ),
    Setting(
        "redirects", "streams", OUTPUT,
        "Write output to files in --log_dir instead of the terminal; same values as --tee.", 0, metavar="STREAMS",
        short="-r",
    ),
    Setting(
        "log_line_prefix", "choice", OUTPUT,
        "Prefix lines with [rank N]: auto (on a terminal, all ranks except 0), all or none. [default: auto]", "auto",
        choices=("auto", "all", "none"),
    ),
    Setting(
        "timeout", "number", OUTPUT,
        "Seconds that a collective may wait for the other processes; 0 for no limit. [default: 600]", from_zero=True,
        metavar="SECONDS", variables=("ZEROACCEL_COLLECTIVE_TIMEOUT",),
    ),
    Setting(
        "debug", "switch", OUTPUT, "Show full tracebacks and the messages of torch's elastic agent.", False,
        rank_variable="ACCELERATE_DEBUG_MODE",
    ),
)  # fmt: skip

ROWS: dict[str, Setting] = {row.name: row for row in _ROWS}
"""Every row, in the order of the questions."""

SETTINGS: dict[str, Setting] = {name: row for group in GROUP_ORDER for name, row in ROWS.items() if row.group == group}
"""The settings that users set, in the order of the flags in help."""
