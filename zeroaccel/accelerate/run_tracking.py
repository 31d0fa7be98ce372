"""The part of `Accelerator` that reports: trackers and metrics. A mixin; trackers themselves are in
`trackers.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from zeroaccel import operations
from zeroaccel.accelerate.accelerator_state import AcceleratorState, GradientState
from zeroaccel.accelerate.nested import map_tensors, tensors_of
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.trackers import GeneralTracker, Trackers

__all__ = ["RunTracking"]


class RunTracking:
    """Mixed into `Accelerator`, which sets the attributes.

    Attributes:
        state, gradient_state, collectives: of the accelerator.
    """

    state: AcceleratorState
    gradient_state: GradientState
    collectives: Collectives

    def _start_tracking(self, log_with: Any, logging_dir: str | None) -> None:
        """To be called once, by `Accelerator.__init__`."""
        self._trackers = Trackers(log_with, logging_dir, is_main_process=self.collectives.rank == 0)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """Those that run on this process."""
        return list(self._trackers)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Starts the trackers of `log_with`, on the main process unless they run on all. (all ranks)

        Args:
            project_name: of the run or project.
            config: hyperparameters, which the trackers keep.
            init_kwargs: by tracker's name, what it is made with besides, e.g. `{"wandb": {"entity": "us"}}`.

        Raises:
            UsageError: `init_kwargs` names another tracker.
        """
        with agreed(self.collectives, "init_trackers"):
            self._trackers.init(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of that name, or the library's object underneath.

        On a process that does not log it is one that does nothing.
        """
        return self._trackers.get(name, unwrap)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Gives numbers of one step to every tracker."""
        self._trackers.log(values, step, log_kwargs)

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Gives images of one step to the trackers that take them."""
        self._trackers.log_images(values, step, log_kwargs)

    def _end_tracking(self) -> None:
        with agreed(self.collectives, "end_training: trackers"):
            self._trackers.finish()

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without the samples that were repeated to fill up the last batches of an epoch. (all ranks)

        Inside a loop over a prepared loader. Anything that is not tensors is gathered as objects.

        Args:
            input_data: tensors of shape (batch, ...), nested as they like; or a list of anything, one per sample.
            use_gather_object: gather tensors as objects too, which may differ in shape.
        """
        as_objects = use_gather_object or not _only_tensors(input_data)
        gathered = operations.gather_object(input_data) if as_objects else operations.gather(input_data)
        remainder = self.gradient_state.remainder
        if not self.gradient_state.end_of_dataloader or remainder < 0:
            return gathered
        if as_objects:
            return gathered[:remainder]
        dims: Iterator[int] = iter([tensor.dim() for tensor in tensors_of(input_data)])

        def without_repeated(tensor: Tensor) -> Tensor:
            return tensor[:remainder] if next(dims) > 0 else tensor  # a scalar per rank is no sample

        return map_tensors(without_repeated, gathered)


def _only_tensors(data: Any) -> bool:
    if isinstance(data, Tensor):
        return True
    if isinstance(data, Mapping):
        return all(map(_only_tensors, data.values()))
    return isinstance(data, (list, tuple)) and all(map(_only_tensors, data))
