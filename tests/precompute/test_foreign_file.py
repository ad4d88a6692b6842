"""A file that somebody else wrote: what it is, its JSON, and what is known of its keys."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from precompute.foreign_file import KnownKeys, key_paths, parsed_json, read_json, what_it_is
from precompute.store.errors import ConfigError, ModelError

KNOWN = KnownKeys(
    "a test's format",
    used=("a", "layer.*.weight", "trees[].*[].x"),
    harmless={"b": "it is only shown", "n": "its own value is looked at first"},
    fixed={"c": (False, None), "n": (1,)},
    refused={"*.scale": "the weights are quantized: save them as floats"},
)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        (b"\n <!DOCTYPE html><html>", "a web page"),
        (b"<HTML><body>502", "a web page"),
        (gzip.compress(b"{}", mtime=0), "gzip"),
        (b"PK\x03\x04rest", "torch.save"),
        (b"\x80\x04\x95rest", "a pickle"),
        (b"\x80\x05\x95rest", "a pickle"),
        (b"\x78\x9crest", "joblib"),
        (b"CBM1rest", "CatBoost's binary format"),
        (b"binfrest", "XGBoost's old binary format"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, content: bytes, named: str) -> None:
    file = tmp_path / "model.json"
    file.write_bytes(content)
    assert named in (what_it_is(file) or "")
    with pytest.raises(ModelError, match=named):
        read_json(file, "model")


def test_what_may_be_a_model_has_no_name(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_bytes(b'{"a": [1, {"b": null}]}')
    assert what_it_is(file) is None
    assert read_json(file, "model") == {"a": [1, {"b": None}]}
    assert what_it_is(tmp_path / "none") is None


@pytest.mark.parametrize("size", [0x8B1F, 0x0280, 0x0480, 0x0580, 0x9C78])
def test_safetensors_may_begin_with_any_length(tmp_path: Path, size: int) -> None:
    """Whatever else begins with its bytes."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(size.to_bytes(8, "little") + b'{"a":')
    assert what_it_is(file) is None


def test_paths_are_of_all_keys() -> None:
    of = {
        "a": {"b": [{"c": 1}, [{"d": 2}]]},
        "m": {"x": {"e": 3}},
        "n": {"left": {"left": {"f": 4}}},
    }
    assert set(key_paths(of, maps=("m",), recursive=("left",))) == {
        *("a", "a.b", "a.b[].c", "a.b[][].d"),
        *("m", "m{}.e"),
        *("n", "n.left", "n.f"),
    }


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_a_number_that_is_not_finite_is_refused_where_asked(tmp_path: Path, number: str) -> None:
    content = f'{{"a": {number}}}'.encode()
    assert parsed_json(content, tmp_path, "model")
    with pytest.raises(ModelError, match=r"is damaged: .* is no finite number"):
        parsed_json(content, tmp_path, "model", finite=True)


def test_a_key_twice_and_a_cut_file_are_damage(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for content, said in (('{"a": 1, "a": 2}', "the key 'a' twice"), ('{"a": 1', "damaged")):
        file.write_text(content)
        with pytest.raises(ModelError, match=said):
            read_json(file, "model")


def test_what_is_known_passes() -> None:
    KNOWN.check({"a": 1, "b": 2, "c": None, "n": 1, "layer.11.weight": 0}, "file", "model")
    KNOWN.check(["trees[].splits[].x"], "file", "model")
    KNOWN.check(["a", "layer.0.weight"], "file", "model")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"z": 1}, "has z, which is not known of a test's format"),
        ({"layer.0.bias": 1}, "has layer.0.bias, which is not known"),
        ({"c": 0}, "c is '0'; only False or None is computed"),
        ({"n": True}, "n is 'True'; only 1 is computed"),
        ({"layer.0.scale": 1}, "has layer.0.scale: the weights are quantized"),
        (["c"], "has c, which is not known"),
    ],
)
def test_what_is_not_known_is_refused(keys: dict[str, object] | list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("*", r"\*")):
        KNOWN.check(keys, "file", "model")
