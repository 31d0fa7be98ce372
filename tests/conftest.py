"""What holds for every test: the pools of ranks, time limits that follow the machine, and what needs a GPU."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import pytest_timeout
import torch

from tests import time_limits
from tests.support.pool import Pool, Ranks
from tests.support.sweeps import Sweep

# Beginnings of the ids of tests that take more than about ten seconds on two cores, beside a quicker one of the same
# kind, which stays in `make test`. What is slow for a reason of its own is marked where it stands.
SLOW = (
    "tests/cuda_model/test_cases.py::test_every_access_is_ordered[overlap, stage 3 on 8 ranks",
    "tests/cuda_model/test_planted_bugs.py::test_it_is_found[gathers are not waited for",
    "tests/e2e/test_deepspeed_command.py::test_the_installed_commands_are_launches",
    "tests/e2e/test_docs.py::test_examples_run[estimate",
    "tests/e2e/test_docs.py::test_examples_run[hand_over",
    "tests/e2e/test_docs.py::test_examples_run[offload",
    "tests/e2e/test_docs.py::test_examples_run[optimizers",
    "tests/e2e/test_docs.py::test_examples_run[resume",
    "tests/e2e/test_docs.py::test_examples_run[sequence_parallel",
    "tests/e2e/test_doctor.py::test_a_script_that_shards_as_it_should",
    "tests/e2e/test_fault_injection.py::test_a_stopped_rank_of_the_launcher[launch",
    "tests/e2e/test_launch_hosts.py::test_a_machine_that_does_not_answer_is_not_waited_for",
    "tests/e2e/test_launch_hosts.py::test_a_rank_is_killed_and_the_job_from_a_hostfile_completes",
    "tests/e2e/test_launch_hosts.py::test_the_same_by_c10d_from_each_machine",
    "tests/e2e/test_launch_settings.py::test_a_file_for_fsdp_trains_at_the_stage_that_shards_the_same_way",
    "tests/e2e/test_launch_settings.py::test_flags_fill_a_json_in_which_everything_is_auto",
    "tests/e2e/test_templates.py::test_every_json_config_trains_and_residency_changes_no_loss",
    "tests/e2e/test_train_gpt.py::test_stage_0_learns_and_writes_the_same",
    "tests/e2e/test_train_gpt.py::test_with_everything_in_files_it_writes_the_same",
    "tests/multi/accelerate/test_accelerator_compilation.py::test_compiled_models_train_alike",
    "tests/multi/accelerate/test_accelerator_compilation.py::test_the_compile_section_and_engine_compile_change_no_bit[eager-0",
    "tests/multi/accelerate/test_accelerator_training.py::test_every_combination_follows_a_plain_loop[3-SGD",
    "tests/multi/checkpoint/test_checkpoint_background.py::test_a_killed_rank_ends_the_save_at_once",
    "tests/multi/checkpoint/test_checkpoint_background.py::test_the_end_of_the_program_waits_for_the_save",
    "tests/multi/checkpoint/test_checkpoint_kill.py::test_a_killed_save_leaves_the_checkpoint_before_it",
    "tests/multi/checkpoint/test_checkpoint_matrix.py::test_any_ranks_and_stage_to_any_other[1-4",
    "tests/multi/checkpoint/test_checkpoint_matrix.py::test_any_ranks_and_stage_to_any_other[1-1",
    "tests/multi/checkpoint/test_checkpoint_matrix.py::test_any_ranks_and_stage_to_any_other[1-3",
    "tests/multi/checkpoint/test_checkpoint_matrix.py::test_any_ranks_and_stage_to_any_other[2-4",
    "tests/multi/checkpoint/test_checkpoint_matrix.py::test_any_ranks_and_stage_to_any_other[4-4",
    "tests/multi/checkpoint/test_checkpoint_matrix.py::test_any_ranks_and_stage_to_any_other[3-",
    "tests/multi/checkpoint/test_checkpoint_matrix.py::test_any_ranks_and_stage_to_any_other[4-1",
    "tests/multi/checkpoint/test_checkpoint_matrix.py::test_any_ranks_and_stage_to_any_other[4-3",
    "tests/multi/compat/test_compat_jobs.py::test_a_job_is_joined_by_its_address",
    "tests/multi/zero/test_device_boundary.py::test_bits_on_several_ranks[1-3",
    "tests/multi/zero/test_engine_hangs.py::test_an_evaluation_on_rank_0_only",
    "tests/multi/zero/test_engine_hangs.py::test_ranks_that_take_different_branches",
    "tests/multi/estimate/test_estimate_peak.py::test_the_peak_is_as_estimated[0-bf16-2",
    "tests/e2e/test_examples.py::test_the_text_classifier_learns_under_the_launcher",
    "tests/multi/offload/test_offload_memory.py::test_states_of_four_times_the_memory_limit",
    "tests/multi/offload/test_offload_promise.py::test_tiers_give_the_same_bits[1-fp32-AdamW",
    "tests/multi/offload/test_offload_promise.py::test_tiers_give_the_same_bits[1-bf16-SGD",
    "tests/multi/offload/test_offload_promise.py::test_tiers_give_the_same_bits[3-bf16-AdamW",
    "tests/multi/offload/test_offload_promise.py::test_tiers_give_the_same_bits[3-fp32-SGD",
    "tests/multi/offload/test_offload_update_time.py::test_updates_in_backward_give_the_same_bits[fp32-optimizer0",
    "tests/multi/offload/test_offload_update_time.py::test_updates_in_backward_give_the_same_bits[bf16-optimizer1",
    "tests/multi/offload/test_offload_residual.py::test_every_tier_has_the_bits_of_fp32_masters[optimizer1-4",
    "tests/multi/zero/test_promise.py::test_stages_give_the_same_bits[3-bf16-2",
    "tests/multi/zero/test_promise.py::test_stages_give_the_same_bits[1-fp32-3",
    "tests/multi/zero/test_promise.py::test_stages_give_the_same_bits[1-fp16-3",
    "tests/multi/zero/test_promise.py::test_stages_give_the_same_bits[1-bf16-2",
    "tests/multi/zero/test_promise.py::test_stages_give_the_same_bits[3-fp16",
    "tests/multi/zero/test_promise.py::test_stages_give_the_same_bits[3-fp32",
    "tests/multi/comm/test_zeropp.py::test_codes_keep_their_bounds[6-",
    "tests/multi/comm/test_zeropp.py::test_where_shards_are_changes_nothing[fp16-2-optimizer2",
    "tests/unit/estimate/test_estimate.py::test_a_few_of_many_blocks_tell_of_all",
    "tests/unit/estimate/test_estimate.py::test_the_recommended_plan_comes_first_and_fits",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()  # what the libraries and the tests are made of: no collection needs to look at it again


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sweeps", "tests that draw many cases from a seed")
    group.addoption("--sweep-seed", type=int, default=0, help="the seed that the slow sweeps start from")
    group.addoption(
        "--sweep-count", type=int, default=0, help="how many cases each slow sweep draws; 0: its own number"
    )
    group.addoption("--sweep-report", default="", help="a file to which each case adds a line of JSON")


@pytest.fixture
def sweep(pytestconfig: pytest.Config) -> Sweep:
    """Seed, count and report of the slow sweeps, from the command line."""
    return Sweep(*(pytestconfig.getoption(name) for name in ("sweep_seed", "sweep_count", "sweep_report")))


def pytest_configure() -> None:
    torch.set_num_threads(1)  # beside ranks, threads that wait for each other's core take many times as long
    # Processes of xdist, and whatever a test starts, inherit it.
    os.environ.setdefault(time_limits.VARIABLE, f"{time_limits.measure():.1f}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [
        f"time limits: x {os.environ[time_limits.VARIABLE]} (of a quiet machine's)",
        f"sweeps: --sweep-seed {config.getoption('sweep_seed')}",
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """In place of pytest-timeout's own timer, which knows the time only."""
    if settings.method != "signal":
        return None
    limit = time_limits.Limit(settings.timeout)

    def strike(number: int, frame: object) -> None:
        __tracebackhide__ = True
        if left := limit.left():
            signal.setitimer(signal.ITIMER_REAL, left)
        else:
            pytest_timeout.timeout_sigalrm(item, settings._replace(timeout=limit.total))

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, limit.left())
    return True


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """``ranks(world_size)`` is the pool of that size, the same one in every test of the session."""
    pools: dict[int, Pool] = {}

    def of_size(world_size: int) -> Pool:
        if world_size not in pools:
            pools[world_size] = Pool(
                world_size, tmp_path_factory.mktemp(f"ranks{world_size}-"), pytestconfig.getini("filterwarnings")
            )
        return pools[world_size]

    yield of_size
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def ranks_without_libraries(ranks: Ranks) -> Iterator[None]:
    """Ranks that have not imported accelerate and transformers: `compat.install` has to come before that."""
    pools = [ranks(world_size) for world_size in (1, 2)]
    before = [pool.imports for pool in pools]
    for pool in pools:
        pool.close()
        pool.imports = ()
    yield
    for pool, imports in zip(pools, before, strict=True):
        pool.close()
        pool.imports = imports


@pytest.fixture
def own_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a job of its own, which ends with the test."""
    from zeroaccel.comm.topology import destroy

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    destroy()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
