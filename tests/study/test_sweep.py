"""Products of lists, and their runs."""

import pytest

from iosim.errors import RequestError
from iosim.kernels import load_kernel
from iosim.profiles import load_profile
from iosim.study.sweep import How, check, default_dtype, nearest_fit, points, run, run_one, takes

FLASH2, GEMM, COPY = load_kernel("flash2"), load_kernel("gemm"), load_kernel("copy")
H200, V5E = load_profile("h200"), load_profile("tpu-v5e")


def test_the_first_axis_varies_slowest() -> None:
    found = points([FLASH2], [H200], {"seqlen": (64, 128), "tile": ((16, 16), (32, 16))})
    assert [(p.problem.seqlen, p.schedule.tile) for p in found] == [  # type: ignore[union-attr]
        (64, (16, 16)), (64, (32, 16)), (128, (16, 16)), (128, (32, 16)),
    ]  # fmt: skip


def test_axes_leave_other_kernels_alone() -> None:
    found = points([FLASH2, GEMM], [H200], {"seqlen": (64, 128), "m": (64, 128, 256)})
    assert [p.kernel.name for p in found] == ["flash2"] * 2 + ["gemm"] * 3


def test_what_a_kernel_takes() -> None:
    assert takes(FLASH2, "order")
    assert takes(GEMM, "group")
    assert takes(COPY, "bytes")
    assert not takes(COPY, "stride")
    assert not takes(FLASH2, "group")
    assert not takes(GEMM, "bytes")


def test_bytes_become_elements() -> None:
    [point] = points([COPY], [H200], {"bytes": (4096,), "dtype": ("fp32",)})
    assert point.problem.elements == 1024  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="no whole number"):
        points([COPY], [H200], {"bytes": (4098,), "dtype": ("fp32",)})


def test_the_type_is_the_chips_own() -> None:
    assert (default_dtype(H200), default_dtype(V5E)) == ("fp16", "bf16")


def test_check_names_the_point() -> None:
    chosen = points([FLASH2], [V5E], {"tile": ((256, 256), (256, 100))})
    with pytest.raises(RequestError, match=r"flash2, 256x100, on tpu-v5e"):
        check(chosen)
    with pytest.raises(RequestError, match="no form"):
        check(points([load_kernel("flash1")], [V5E], {}))


def test_results_stand_in_order_whoever_ends_first() -> None:
    axes = {"heads": (1,), "seqlen": (4096, 128, 1024), "tile": ((128, 128),)}
    chosen = points([FLASH2], [V5E], axes)
    told: list[int] = []
    results = run(chosen, How(), told.append)
    assert [r.problem for r in results] == [p.problem for p in chosen]
    assert told == [1, 2, 3]
    assert results[1].as_json() == run_one(chosen[1], How()).as_json()


def test_the_nearest_tile_that_fits() -> None:
    [result] = run(points([FLASH2], [H200], {"tile": ((512, 256),)}), How())
    assert not result.fits
    tile = nearest_fit(result, FLASH2)
    assert tile == (128, 64) or tile == (256, 128)
    [again] = points([FLASH2], [H200], {"tile": (tile,)})
    check([again])
