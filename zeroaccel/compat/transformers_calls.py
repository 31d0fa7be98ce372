"""Patches for transformers and accelerate calls that fail with sharded parameters, or with parts of layers on ranks.

`accelerate/pretrained_saving.py` patches `PreTrainedModel.save_pretrained` without a state dict. `Trainer.train`
destroys the engine of an earlier evaluation or training and would continue with it: the patch restarts from the model
or, if the Trainer made the optimizer, keeps engine and optimizer. `Accelerator.get_state_dict` below stage 3 reads the
module's own state dict; the patch gathers it if ranks hold parts of layers or different experts. With
`TrainingArguments(enable_jit_checkpoint=True)`, each rank saves when its own timer expires; the patch makes the ranks
agree on the step, and save after `on_step_end` has counted it. accelerate's `backward` with a DeepSpeed engine also
updates; the patch leaves the update to `optimizer.step()`, so that callbacks and loops can read gradients. `attach`
applies these patches for each engine, to imported libraries only; `detach()` restores the originals. It also says which
adapters of PEFT compute in 16 bits. `finder.py` patches `from_pretrained`, with `init_of_quantized` and
`with_own_conversions`, when transformers is imported, PEFT's `get_peft_model` with `noting_dtypes`, and
accelerate's state with `telling_of_a_dropped_plugin`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroaccel.accelerate import pretrained_saving
from zeroaccel.comm.stop_notice import stop_notice
from zeroaccel.compat.deepspeed_init import DeepSpeedInit
from zeroaccel.engine import EngineBase
from zeroaccel.logs import log_once

_ORIGINALS: dict[tuple[type, str], Callable[..., Any]] = {}


def attach(engine: EngineBase) -> None:
    """Makes the calls use this engine until it is destroyed."""
    pretrained_saving.attach(engine)
    _say_adapter_dtypes(engine.module)
    owner = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if owner is not None:
        _patch(owner, "train", _from_the_model)
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if accelerator is not None:
        _patch(accelerator, "get_state_dict", _of_all_ranks)
    wrappers = sys.modules.get("accelerate.utils.deepspeed")
    if wrappers is not None:
        _patch(wrappers.DeepSpeedEngineWrapper, "backward", _without_update)
        _patch(wrappers.DeepSpeedOptimizerWrapper, "step", _with_update)
    # Trainer sets its handler before it creates an engine; the engine's handler replaces it.
    saver = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if engine.optimizer is not None and hasattr(saver, "is_checkpoint_requested"):
        callback = sys.modules[type(saver).__module__].JITCheckpointCallback
        # A save at this call would come before the update of a step whose gradients are complete.
        _patch(callback, "on_pre_optimizer_step", lambda original: lambda *args, **kwargs: None)
        _patch(type(saver), "_enable_checkpoint", lambda original: lambda saver: stop_notice.give())
        _patch(type(saver), "execute_jit_checkpoint", _beside_other_ranks)
        stop_notice.saved = ""  # this training is not over
        engine.when_preempted(functools.partial(_ask_to_save, saver))


def _beside_other_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets every rank remove the mark of an incomplete checkpoint: for all but one, the file is already gone."""

    @functools.wraps(original)
    def execute(saver: Any) -> None:
        try:
            original(saver)
        except FileNotFoundError as error:
            if Path(error.filename or "").name != "checkpoint-is-incomplete.txt":
                raise

    return execute


def _ask_to_save(saver: Any) -> None:
    """Makes Trainer save and return after this step, and the launcher exit with the code for preemption."""
    saver.is_checkpoint_requested = True
    stop_notice.saved = "Trainer saved a checkpoint"


def _patch(owner: type, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    if (owner, name) not in _ORIGINALS:
        _ORIGINALS[owner, name] = original = vars(owner)[name]
        setattr(owner, name, change(original))


def detach() -> None:
    """Restores the original calls."""
    pretrained_saving.detach()
    while _ORIGINALS:
        (owner, name), original = _ORIGINALS.popitem()
        setattr(owner, name, original)


_POSTPONED: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()  # optimizer -> its engine
_UPDATE_IN_BACKWARD: weakref.WeakSet[Any] = weakref.WeakSet()  # engines whose loops call no optimizer.step()


def update_in_backward(engine: EngineBase) -> None:
    """Makes accelerate's `backward` update from now on, since the loop went on without `optimizer.step()`."""
    _UPDATE_IN_BACKWARD.add(engine)
    log_once(
        logging.WARNING,
        "accelerator.backward(loss): expected optimizer.step() next, got another use of the model; the update runs "
        "before it, and from now on inside accelerator.backward, after which gradients cannot be read. To read them, "
        "call optimizer.step() before the next forward, evaluation or save",
    )


def _without_update(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps accelerate's `DeepSpeedEngineWrapper.backward`, whose `engine.step()` only examines the gradients."""

    @functools.wraps(original)
    def backward(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        engine = wrapper.engine
        if engine in _UPDATE_IN_BACKWARD:
            return original(wrapper, *args, **kwargs)
        _POSTPONED[engine.optimizer] = weakref.ref(engine)
        with engine.postponing_updates():
            return original(wrapper, *args, **kwargs)

    return backward


def _with_update(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps accelerate's `DeepSpeedOptimizerWrapper.step`, which does nothing, to run the postponed update."""

    @functools.wraps(original)
    def step(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(wrapper, *args, **kwargs)
        find = _POSTPONED.get(wrapper.optimizer)
        engine = None if find is None else find()
        if engine is not None:
            engine.finish_step()
        return result

    return step


def _from_the_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Trainer.train`, so that it does not continue with an inference engine or a destroyed one.

    Without the facade a second training continues with the weights and the states of the Trainer's optimizer, and with
    a new schedule. The engine of the first training does the same, unless the config defines optimizer or schedule.
    """

    @functools.wraps(original)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        engine = trainer.model_wrapped
        if not isinstance(engine, EngineBase):
            return original(trainer, *args, **kwargs)
        config = _config(trainer)
        defined = "optimizer" in config or "scheduler" in config
        if engine.optimizer is None or engine.is_destroyed or defined:
            had_optimizer = engine.optimizer is not None
            engine.destroy()
            _restore_config(trainer)
            trainer.model_wrapped, trainer.deepspeed = trainer.model, None
            if had_optimizer:  # it trains the destroyed engine's parameters
                trainer.optimizer = trainer.lr_scheduler = None
            return original(trainer, *args, **kwargs)
        with _sparing(trainer, engine):
            return original(trainer, *args, **kwargs)

    return train


@contextmanager
def _sparing(trainer: Any, engine: EngineBase) -> Iterator[None]:
    """Lets Trainer and accelerator keep this engine and its optimizer, as long as the Trainer uses the engine."""
    accelerator, optimizer, before = trainer.accelerator, trainer.optimizer, dict(vars(trainer))
    free, create = accelerator.free_memory, trainer.create_optimizer

    def free_memory(*objects: Any) -> Any:
        if trainer.model_wrapped is not engine:  # a new model of `model_init`
            return free(*objects)
        wrapped, accelerator.deepspeed_engine_wrapped = accelerator.deepspeed_engine_wrapped, None
        result = free(*objects)
        accelerator.deepspeed_engine_wrapped = wrapped
        accelerator._models, accelerator._optimizers = [engine], [optimizer]
        return result

    def create_optimizer(*args: Any, **kwargs: Any) -> Any:
        # transformers drops the optimizer first. Another one would have the sharded parameters, and transformers 4
        # would schedule and step that one.
        if trainer.model_wrapped is not engine:
            return create(*args, **kwargs)
        trainer.optimizer = optimizer
        return optimizer

    accelerator.free_memory, trainer.create_optimizer = free_memory, create_optimizer
    try:
        yield
    finally:
        del accelerator.free_memory, trainer.create_optimizer
        if "create_optimizer" in before:  # replaced by the user, in this trainer
            trainer.create_optimizer = create


def warn_of_dropped_optimizer(trainer: Any) -> None:
    """Warns that `Trainer(optimizers=...)` has no effect: transformers drops both with a DeepSpeed config."""
    if not trainer.is_deepspeed_enabled or isinstance(trainer.model_wrapped, EngineBase):
        return
    made = getattr(trainer, "_created_lr_scheduler", False)  # by an earlier training
    pair = {"optimizer": trainer.optimizer, "scheduler": None if made else trainer.lr_scheduler}
    names = [name for name, each in pair.items() if each is not None and "accelerate" not in type(each).__module__]
    if not names:
        return
    section = _config(trainer).get("optimizer")
    written = {} if section is None else section.get("params", {})
    rate = written.get("lr", "auto")
    log_once(
        logging.WARNING,
        f"Trainer(optimizers=...): transformers drops its {' and '.join(names)} with a DeepSpeed config, and makes the "
        f"optimizer of {'TrainingArguments' if section is None else 'the config'}, with learning rate "
        f"{trainer.args.learning_rate if rate == 'auto' else rate}; set TrainingArguments(learning_rate=..., "
        "optim=...), or make the optimizer in create_optimizer of a subclass",
    )


def telling_of_a_dropped_plugin(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of accelerate's state, which drops a plugin if the job uses the CPU."""

    @functools.wraps(original)
    def init(state: Any, *args: Any, **kwargs: Any) -> None:
        original(state, *args, **kwargs)
        if kwargs.get("deepspeed_plugin") is not None and state.distributed_type.name != "DEEPSPEED":
            log_once(
                logging.WARNING,
                "accelerate: expected training with the DeepSpeed config, got plain data parallelism, since the "
                "variable ACCELERATE_USE_CPU or Accelerator(cpu=True) is set; remove it. `zeroaccel launch --cpu` and "
                "TrainingArguments(use_cpu=True) keep the config",
            )

    return init


def _config(trainer: Any) -> Any:
    return getattr(trainer.accelerator.state.deepspeed_plugin, "deepspeed_config", {})


def _of_all_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Accelerator.get_state_dict`: gathers divided layers also at stages that do not shard parameters."""

    @functools.wraps(original)
    def get_state_dict(accelerator: Any, model: Any, unwrap: bool = True) -> Any:
        ranks = model.collectives if isinstance(model, EngineBase) and not model.settings.plan.params else None
        if ranks is None or (ranks.parts is None and ranks.part_holders is None):
            return original(accelerator, model, unwrap)
        return model._consolidated_16bit_state_dict()

    return get_state_dict


_UNCAST: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # PeftModel -> place of the call


def noting_dtypes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps PEFT's `get_peft_model`: notes the place of a call that turns its casts of adapters to fp32 off."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        if not inspect.signature(original).bind(*args, **kwargs).arguments.get("autocast_adapter_dtype", True):
            caller = sys._getframe(1)
            _UNCAST[model] = f"{caller.f_globals.get('__name__')}:{caller.f_lineno}"
        return model

    return make


def _say_adapter_dtypes(model: nn.Module) -> None:
    """Logs which of PEFT's adapters the engine trains in 16 bits, where PEFT's default is fp32, and the cure.

    TRL's trainers turn that default off at stage 3, as DeepSpeed gathers parameters of one dtype only. Here the config
    decides at every stage, so the call changes no bits.
    """
    names: dict[str, None] = {}
    adapters, dtypes = set(getattr(model, "peft_config", None) or ()), set()
    for name, param in model.named_parameters():
        path = name.split(".")
        place = next((at for at in range(len(path) - 1, 0, -1) if path[at] in adapters), 0)
        if place and param.requires_grad and param.dtype in (torch.bfloat16, torch.float16):
            names[path[place - 1]] = None
            dtypes.add(str(param.dtype))
    if not names:
        return
    call = _UNCAST.get(model)
    cast = f"{call} calls get_peft_model with autocast_adapter_dtype=False; " if call else ""
    log_once(
        logging.INFO if call is None else logging.WARNING,
        f"{cast}PEFT's adapters ({', '.join(names)}) compute in {' and '.join(sorted(dtypes))} with fp32 masters, as "
        "bf16 and fp16 in the config do at each stage. To keep them in fp32, also in saved files, set "
        f'"data_types": {{"keep_in_fp32_modules": {json.dumps(list(names))}}}',
    )


def init_of_quantized(quantization: Any) -> AbstractContextManager[Any]:
    """Returns `zero.Init` for a bitsandbytes base model at stage 3, which transformers would load whole on every rank.

    Args:
        quantization: the quantization config, an object or a dict.
    """
    deepspeed = sys.modules["transformers.integrations.deepspeed"]
    read = quantization.get if isinstance(quantization, dict) else functools.partial(getattr, quantization)
    if read("quant_method", None) != "bitsandbytes" or not deepspeed.is_deepspeed_zero3_enabled():
        return nullcontext()
    return DeepSpeedInit(config_dict_or_path=deepspeed.deepspeed_config())


def with_own_conversions(loaded: Any) -> Any:
    """Returns the result of `from_pretrained`, whose model has only the conversions that its save has to reverse.

    transformers applies the conversions of a load in reverse when it saves. At stage 3 it keeps all that it knows:
    BERT's `LayerNorm.weight` would become `LayerNorm.gamma`, the name in files of old versions. For a model that it has
    dequantized it would write codes of all layers, or 16-bit values under the names of codes, without a quantization
    config: files that load as noise. Such a model saves its values under the names of its layers.
    """
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    conversions = getattr(model, "_weight_conversions", None)
    if isinstance(conversions, list):
        used = [each for each in conversions if not hasattr(each, "was_used") or each.was_used()]
        plain = getattr(model.config, "quantization_config", None) is None
        model._weight_conversions = [new for each in used if (new := _of_values(each) if plain else each) is not None]
    return loaded


def _of_values(conversion: Any) -> Any:
    """Returns a conversion without its dequantization; None if it has no other operation."""
    operations = list(getattr(conversion, "operations", ()))
    others = [each for each in operations if not type(each).__name__.endswith("Dequantize")]
    if len(others) == len(operations):
        return conversion
    scales = ("weight_scale_inv", "activation_scale", "_scales")
    sources = [name for name in conversion._original_source_patterns if not name.endswith(scales)]
    return conversion.copy(sources, list(conversion._original_target_patterns), operations=others) if others else None


def _restore_config(trainer: Any) -> None:
    """Undoes an evaluation's changes to the config: schedule lengths for zero steps, and a missing optimizer.

    transformers deletes the optimizer's section for an evaluation. Without it, training would use torch's AdamW.
    """
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    config = getattr(plugin, "hf_ds_config", None)
    if config is None or not getattr(trainer.args, "deepspeed", None):
        return
    written = type(config).__mro__[-2](trainer.args.deepspeed)  # accelerate's own class, which only reads
    for name in ("total_num_steps", "warmup_num_steps"):
        if written.get_value(f"scheduler.params.{name}") == "auto":
            config.config["scheduler"]["params"][name] = "auto"
    section = written.config.get("optimizer")
    if section is not None and "optimizer" not in config.config:
        config.config["optimizer"] = copy.deepcopy(section)
        config.trainer_config_process(trainer.args)  # fills in "auto" values from the arguments, like at the start
