"""Table of the mesh axes: the classes that implement the sizes of a `ParallelConfig`.

A new axis is a class derived from `setup.axis.Axis` and one line here.
"""

from __future__ import annotations

from zeroaccel.parallel.experts import ExpertAxis
from zeroaccel.parallel.pipeline import PipelineAxis
from zeroaccel.parallel.tensor_axis import TensorAxis
from zeroaccel.parallel.ulysses import SequenceAxis
from zeroaccel.setup.axis import Axis

AXES: list[type[Axis]] = [TensorAxis, ExpertAxis, PipelineAxis, SequenceAxis]
"""In the order in which they divide a model: tensor-parallel plans and expert divisions need the whole model."""
