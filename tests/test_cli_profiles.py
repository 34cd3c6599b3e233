"""`iosim profiles` and `iosim kernels`."""

import json

import pytest

from iosim.cli import main
from iosim.kernels import kernel_names, load_kernel
from iosim.profiles import load_profile, profile_names

Capture = pytest.CaptureFixture[str]


def said(capsys: Capture, *arguments: str) -> str:
    """What a run that must not fail says."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def test_profiles_lists_all(capsys: Capture) -> None:
    out = said(capsys, "profiles")
    assert all(f"\n{name} " in out for name in profile_names())
    assert max(len(line) for line in out.splitlines()) <= 100


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_shows_every_number(name: str, capsys: Capture) -> None:
    out = " ".join(said(capsys, "profiles", name).split())
    for fact in load_profile(name).facts.values():
        value = f"{int(fact.value):,}" if fact.value == int(fact.value) else f"{fact.value:,}"
        assert f" {value} " in out
        assert fact.kind in out


def test_an_alias_says_what_it_means(capsys: Capture) -> None:
    assert said(capsys, "profiles", "tpu-v5").startswith("tpu-v5 = tpu-v5p: ")


def test_profiles_as_json(capsys: Capture) -> None:
    document = json.loads(said(capsys, "profiles", "--json"))
    assert document["format"] == 1
    assert [chip["name"] for chip in document["profiles"]] == list(profile_names())
    numbers = document["profiles"][0]["numbers"]
    assert set(numbers["cores.clock_hz"]) == {"value", "unit", "kind", "source", "other"}
    assert numbers["cores.clock_hz"]["unit"] == "Hz"
    assert numbers["levels.hbm.capacity_bytes"]["unit"] == "bytes"


def test_a_profile_from_a_file(capsys: Capture, tmp_path_factory: pytest.TempPathFactory) -> None:
    from importlib.resources import files

    path = tmp_path_factory.mktemp("chips") / "mine.toml"
    text = (files("iosim") / "hardware_profiles" / "h200.toml").read_text()
    path.write_text(text.replace('name = "h200"', 'name = "mine"', 1))
    assert "NVIDIA H200" in said(capsys, "profiles", str(path))


def test_kernels_lists_all(capsys: Capture) -> None:
    out = said(capsys, "kernels")
    assert all(f"\n{name} " in out for name in kernel_names())


@pytest.mark.parametrize("name", kernel_names())
def test_a_kernel_in_words(name: str, capsys: Capture) -> None:
    kernel = load_kernel(name)
    out = said(capsys, "kernels", name)
    folded = " ".join(out.split())
    assert kernel.summary in folded
    assert kernel.loops in folded
    assert all(source in folded for source in kernel.sources)
    assert all(parameter in out for parameter in kernel.parameters)
    nest = [line for line in out.splitlines() if line.startswith("    ")]
    assert any("for each" in line for line in nest), "the loops as the file shows them"
    assert "which tile when" in out
    assert "closed forms" in out


@pytest.mark.parametrize("profile", ["h200", "tpu-v5e"])
@pytest.mark.parametrize("name", kernel_names())
def test_a_kernel_on_a_chip(name: str, profile: str, capsys: Capture) -> None:
    if load_profile(profile).machine not in load_kernel(name).machines:
        pytest.skip("no such form")
    out = said(capsys, "kernels", name, "--profile", profile)
    assert "tile " in out
    document = json.loads(said(capsys, "kernels", name, "--profile", profile, "--json"))
    [entry] = document["kernels"]
    assert entry["on"]["profile"] == profile
    for form in entry["on"]["closed_forms"]:
        assert f"{form['value']:,}" in out


def test_kernels_as_json(capsys: Capture) -> None:
    document = json.loads(said(capsys, "kernels", "--json"))
    assert document["format"] == 1
    assert [kernel["name"] for kernel in document["kernels"]] == list(kernel_names())
