"""Learning rates that DeepSpeed 0.19.8 writes for AdamW(lr=LR), printed by running its schedules for these settings."""

from __future__ import annotations

from typing import Any

LR = 5e-3

# fmt: off
# name -> type, settings, rates: the first at construction, then one per step.
RATES: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "warmup, log": ("WarmupLR", {"warmup_max_lr": 0.001, "warmup_num_steps": 6}, [
        0.0, 0.0, 0.0003868528072345415, 0.0006131471927654584, 0.000773705614469083, 0.000898244401703927,
        0.0009999999999999998, 0.001, 0.001, 0.001]),
    "warmup, linear from a minimum": ("WarmupLR",
        {"warmup_min_lr": 1e-05, "warmup_max_lr": 0.001, "warmup_num_steps": 6, "warmup_type": "linear"}, [
        1e-05, 1e-05, 0.000175, 0.00034, 0.000505, 0.00067, 0.000835, 0.001, 0.001, 0.001]),
    "warmup of one step": ("WarmupLR", {"warmup_max_lr": 0.001, "warmup_num_steps": 1}, [
        0.0, 0.0, 0.001, 0.001, 0.001, 0.001]),
    "warmup to the group's rate": ("WarmupLR", {"warmup_min_lr": 0.0001, "warmup_num_steps": 4}, [
        0.0001, 0.0001, 0.0025499999999999997, 0.003983158126766833, 0.005, 0.005, 0.005, 0.005]),
    "decay, log": ("WarmupDecayLR", {"total_num_steps": 11, "warmup_num_steps": 4}, [
        0.0, 0.0, 0.0005, 0.0007924812503605781, 0.001, 0.001, 0.0008571428571428571, 0.0007142857142857143,
        0.0005714285714285714, 0.00042857142857142855, 0.0002857142857142857, 0.00014285714285714284, 0.0, 0.0, 0.0]),
    "decay, linear from a minimum": ("WarmupDecayLR",
        {"total_num_steps": 11, "warmup_min_lr": 0.0001, "warmup_max_lr": 0.002, "warmup_num_steps": 4, "warmup_type":
        "linear"}, [
        0.0001, 0.0001, 0.000575, 0.00105, 0.001525, 0.002, 0.0017285714285714285, 0.0014571428571428572,
        0.0011857142857142856, 0.0009142857142857143, 0.0006428571428571428, 0.0003714285714285714, 0.0001, 0.0001]),
    "decay that is over before the warmup": ("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 5}, [
        0.0, 0.0, 0.00043067655807339306, 0.0006826061944859854, 0.0008613531161467861, 0.001, 0.0, 0.0, 0.0, 0.0]),
    "cosine, log": ("WarmupCosineLR", {"total_num_steps": 11, "warmup_num_steps": 4}, [
        0.0, 0.0, 0.0025, 0.003962406251802891, 0.005, 0.004752446927539072, 0.0040588186321963695,
        0.0030564967046572966, 0.0019440032953427033, 0.000941681367803631, 0.000248053072460928, 5.000000000000001e-07,
        5.000000000000001e-07, 5.000000000000001e-07]),
    "cosine, linear from a ratio": ("WarmupCosineLR",
        {"total_num_steps": 11, "warmup_min_ratio": 0.1, "warmup_num_steps": 4, "cos_min_ratio": 0.05, "warmup_type":
        "linear"}, [
        0.0, 0.0005, 0.0016250000000000001, 0.0027500000000000003, 0.0038750000000000004, 0.004764801061268246,
        0.004105788279414492, 0.0031534872181462467, 0.002096512781853753, 0.001144211720585508, 0.00048519893873175476,
        0.00025, 0.00025, 0.00025]),
    "cycle": ("OneCycle", {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.001, "cycle_first_step_size": 4}, [
        0.0001, 0.000325, 0.00055, 0.0007750000000000001, 0.001, 0.0007750000000000001, 0.00055, 0.000325, 0.0001,
        0.0001, 0.0001]),
    "cycle, uneven, with decay": ("OneCycle",
        {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.001, "cycle_first_step_size": 3, "cycle_second_step_size": 5,
        "decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01, "cycle_min_mom": 0.85, "cycle_max_mom":
        0.95}, [
        0.0001, 0.00039999999999999996, 0.0007, 0.001, 0.0008200000000000001, 0.00064, 0.00046, 0.00028000000000000003,
        0.0001, 8e-05, 6.666666666666667e-05, 5.714285714285715e-05, 5e-05, 4.4444444444444447e-05, 4e-05]),
    "cycle of stairs": ("OneCycle",
        {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.001, "cycle_first_step_size": 5, "cycle_second_step_size": 7,
        "cycle_first_stair_count": 2, "cycle_second_stair_count": 3}, [
        0.0001, 0.0001, 0.0001, 0.00055, 0.00055, 0.001, 0.0007, 0.0007, 0.00039999999999999996, 0.00039999999999999996,
        0.0001, 0.0001, 0.0001, 0.0001, 0.0001, 0.0001]),
    "cycle without a way down": ("OneCycle",
        {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.001, "cycle_first_step_size": 4, "cycle_second_step_size": 0,
        "cycle_momentum": False}, [
        0.0001, 0.000325, 0.00055, 0.0007750000000000001, 0.0001, 0.0001, 0.0001, 0.0001]),
    "range": ("LRRangeTest",
        {"lr_range_test_min_lr": 0.0001, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0}, [
        0.0001, 0.00016666666666666666, 0.0002333333333333333, 0.00030000000000000003, 0.00036666666666666667,
        0.0004333333333333334, 0.0005, 0.0005666666666666667, 0.0006333333333333333]),
    "range in stairs": ("LRRangeTest",
        {"lr_range_test_min_lr": 0.0001, "lr_range_test_step_size": 3, "lr_range_test_staircase": True}, [
        0.0001, 0.0001, 0.0001, 0.0002, 0.0002, 0.0002, 0.00030000000000000003, 0.00030000000000000003,
        0.00030000000000000003]),
}
# beta1 in the cycles above, in the same order; DeepSpeed's first step has the minimum.
BETA1: dict[str, list[float]] = {
    "cycle": [
        0.8, 0.875, 0.8500000000000001, 0.8250000000000001, 0.8, 0.8250000000000001, 0.8500000000000001, 0.875, 0.9,
    ],
    "cycle, uneven, with decay": [
        0.85, 0.9166666666666666, 0.8833333333333333, 0.85, 0.87, 0.89, 0.9099999999999999, 0.9299999999999999, 0.95,
        0.9547499999999999, 0.9594999999999999, 0.9642499999999998, 0.969,
    ],
    "cycle of stairs": [
        0.8, 0.9, 0.9, 0.8500000000000001, 0.8500000000000001, 0.8, 0.8333333333333334, 0.8333333333333334,
        0.8666666666666667, 0.8666666666666667, 0.9, 0.9,
    ],
}
# fmt: on
# With default settings: type -> settings without a default, then last_batch_iteration -> rate.
DEFAULTS: dict[str, tuple[dict[str, Any], dict[int, float]]] = {
    "WarmupLR": ({}, {0: 0.0, 1: 0.0005017166594399687, 7: 0.001505149978319906, 999: 0.005, 6000: 0.005}),
    "WarmupDecayLR": (
        {"total_num_steps": 5000},
        {1: 0.00010034333188799373, 1000: 0.001, 2001: 0.0007497500000000001, 4999: 2.5e-07, 5000: 0.0, 6000: 0.0},
    ),
    "WarmupCosineLR": (
        {"total_num_steps": 5000},
        {7: 0.001505149978319906, 1000: 0.004999999229014302, 2001: 0.004265061472580182, 4999: 5.000000000000001e-07},
    ),
    "OneCycle": (
        {"cycle_min_lr": 1e-05, "cycle_max_lr": 0.001},
        {0: 1.0495000000000166e-05, 7: 1.3960000000000005e-05, 1999: 0.001, 2001: 0.00099901, 3999: 1e-05, 6000: 1e-05},
    ),
    "LRRangeTest": ({}, {0: 0.0010004999999999999, 7: 0.0010040000000000001, 3999: 0.003, 6000: 0.004000500000000001}),
}
