"""The private parts of other libraries that the package uses, and the undocumented ones that it replaces or looks up.

`test_private_names.py` looks for each in the installed version, so that a release that moves one fails by its name, and
for uses that this table lacks. Tried on torch 2.6.0, 2.13.0 and 2.15.0, transformers 5.23.0 and 5.24.0, and accelerate
1.15.0. Prefer a public name: add a row only if there is none.
"""

from __future__ import annotations

from collections.abc import Mapping

# Module -> names in it, or Class.name for attributes of classes and of their instances.
PRIVATE: Mapping[str, str] = {
    "huggingface_hub.constants": "HF_HUB_OFFLINE",
    "numba.core.caching": "Cache._cache_file",
    "numba.core.dispatcher": "Dispatcher._cache",
    # autograd, storages and the compiler
    "torch": "Tensor._base Tensor._is_view Tensor._make_wrapper_subclass _foreach_copy_ _foreach_zero_",
    "torch.storage": "UntypedStorage._cdata",
    "torch._C": "_EnableTorchFunction _current_graph_task_id _functorch _get_tracing_state _storage_Use_Count",
    "torch._C._distributed_c10d": "_make_nccl_premul_sum",
    "torch.autograd": "Variable._execution_engine",
    "torch.autograd.graph": "saved_tensors_hooks.pack_hook saved_tensors_hooks.unpack_hook",
    "torch.autograd.profiler": "_is_profiler_enabled",
    "torch._compile": "_disable_dynamo",
    "torch._dynamo.eval_frame": "OptimizedModule._orig_mod",
    "torch._inductor.cpp_builder": "get_cpp_compiler",
    "torch._inductor.exc": "InvalidCxxCompiler",
    "torch._ops": "OpOverload._schema",
    "torch._ops.ops.aten": "_local_scalar_dense _log_softmax _log_softmax_backward_data "
    "_to_copy _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward",
    "torch._subclasses.fake_tensor": "FakeTensorMode",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes",
    "torch.utils._pytree": "tree_flatten tree_leaves tree_map tree_unflatten",
    "torch.cuda": "_is_in_bad_fork _lazy_call",
    "torch.nn": "Module._call_impl Module._compiled_call_impl Module._forward_hooks Module._forward_pre_hooks "
    "Module._non_persistent_buffers_set Module._parameters Module._save_to_state_dict",
    # process groups, DTensors, stages and the launcher
    "torch.distributed": "ProcessGroup._device_types ProcessGroup._get_backend ProcessGroup._register_backend "
    "ProcessGroup._set_default_backend ProcessGroup._set_group_desc ProcessGroup._set_group_name "
    "ProcessGroup.allgather_into_tensor_coalesced ProcessGroup.allreduce ProcessGroup.reduce_scatter_tensor_coalesced",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.distributed_c10d": "_get_default_store _world",
    "torch.distributed.elastic.agent.server.local_elastic_agent": "LocalElasticAgent._pcontext "
    "LocalElasticAgent._rendezvous LocalElasticAgent._start_workers",
    "torch.distributed.elastic.multiprocessing.subprocess_handler": "SubprocessHandler._popen "
    "SubprocessHandler._stderr SubprocessHandler._stdout",
    "torch.distributed.pipelining": "PipelineStage.backward_maybe_with_nosync PipelineStage.backward_one_chunk "
    "PipelineStage.backward_weight_one_chunk PipelineStage.clear_runtime_states PipelineStage.forward_one_chunk "
    "PipelineStage.forward_maybe_with_nosync PipelineStage.get_bwd_recv_ops PipelineStage.get_bwd_send_ops "
    "PipelineStage.get_fwd_recv_ops PipelineStage.get_fwd_send_ops",
    "torch.distributed.tensor": "DTensor._local_tensor",
    # transformers and accelerate
    "transformers": "PreTrainedConfig._attn_implementation PreTrainedConfig._experts_implementation "
    "PreTrainedConfig._name_or_path",
    "transformers.core_model_loading": "WeightTransform._original_source_patterns "
    "WeightTransform._original_target_patterns convert_and_load_state_dict_in_model set_param_for_module tqdm",
    "transformers.integrations.deepspeed": "deepspeed_config deepspeed_load_checkpoint is_deepspeed_zero3_enabled",
    "transformers.integrations.mxfp4": "FP4_VALUES _convert_moe_packed_tensors",
    "transformers.masking_utils": "ALL_MASK_ATTENTION_FUNCTIONS TransformGetItemToIndex _vmap_expansion_sdpa",
    "transformers.modeling_utils": "ALL_ATTENTION_FUNCTIONS PreTrainedModel._from_config "
    "PreTrainedModel._keys_to_ignore_on_load_unexpected PreTrainedModel._keys_to_ignore_on_save "
    "PreTrainedModel._tp_plan "
    "PreTrainedModel._load_pretrained_model "
    "PreTrainedModel.from_pretrained PreTrainedModel.save_pretrained revert_weight_conversion save_on_cpu",
    "transformers.models.mixtral.modeling_mixtral": "eager_attention_forward load_balancing_loss_func",
    "transformers.pytorch_utils": "Conv1D",
    "transformers.quantizers.base": "HfQuantizer.__init__",
    "transformers.trainer": "Trainer._created_lr_scheduler Trainer._save_rng_state Trainer.get_batch_samples "
    "Trainer.train",
    "transformers.trainer_jit_checkpoint": "CheckpointManager._enable_checkpoint "
    "CheckpointManager.execute_jit_checkpoint CheckpointManager.is_checkpoint_requested "
    "JITCheckpointCallback.on_pre_optimizer_step",
    "accelerate.accelerator": "Accelerator.get_state_dict _refuse_recurrent_layers_under_sequence_parallelism",
    "accelerate.checkpointing": "load_accelerator_state save_accelerator_state",
    "accelerate.data_loader": "DataLoaderDispatcher.__iter__ DataLoaderShard.__iter__ skip_first_batches",
    "accelerate.parallelism_config": "ParallelismConfig._set_size ParallelismConfig._validate_accelerator",
    "accelerate.state": "AcceleratorState.__init__ PartialState._shared_state",
    "accelerate.tracking": "LOGGER_TYPE_TO_CLASS",
    "accelerate.utils.deepspeed": "HfDeepSpeedConfig.__init__",
    "accelerate.utils.other": "extract_model_from_parallel",
    # PEFT and TRL
    "peft.mapping_func": "get_peft_model",
    "peft.tuners.trainable_tokens.layer": "TrainableTokensLayer._collect_token_weights",
    "trl.models.activation_offloading": "OffloadActivations.__enter__ get_act_offloading_ctx_manager",
    "trl.trainer.utils": "maybe_gather_lm_head_ctx",
}

# Names that earlier releases in the supported range lack, or builds without NCCL; the package works without them.
SINCE: Mapping[str, tuple[str, str]] = {
    "_make_nccl_premul_sum": ("torch", "with NCCL"),
}

# Private names of Python itself.
OF_PYTHON = frozenset({"_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_replace"})
