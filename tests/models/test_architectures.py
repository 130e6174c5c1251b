"""Names of architectures: every mistake is a message that says what to write instead."""

from __future__ import annotations

import subprocess
import sys

import pytest

from osfl.core.errors import UsageError
from osfl.core.types import Task
from osfl.models.architectures import TABLE, architecture_for, architectures, architectures_in, check_architecture, parse


def task(side: int = 28, channels: int = 3, classes: int = 8) -> Task:
    return Task("t", tuple(f"c{i}" for i in range(classes)), (channels, side, side))


def test_every_name_is_described_and_parses() -> None:
    assert set(architectures()) == set(TABLE)
    for name, text in architectures().items():
        assert text and "\n" not in text
        assert parse(name)[1] == dict(TABLE[name].options)


def test_options_replace_defaults() -> None:
    assert parse("vit-p4-w192-d6-h3")[1] == {"p": 4, "w": 192, "d": 6, "h": 3}
    assert parse("resnet18-w16")[1] == {"w": 16, "g": 0}


def test_listing_needs_no_torch() -> None:
    code = "import sys, osfl.models.architectures as a; a.architectures(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("resnet81", "resnet18"),
        ("qqq", "Known: cnn"),
        ("", "Known: cnn"),
        ("cnn-w0", "w<number> (width)"),
        ("cnn-x3", "w<number> (width)"),
        ("cnn-", "w<number> (width)"),
        ("cnn-w9999999", "w<number> (width)"),
        ("efficientnet_lite0-w2", "no options"),
    ],
)
def test_unknown_names_and_options(name: str, output: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(name)
    assert output in str(caught.value) and caught.value.field == "architecture"


@pytest.mark.parametrize(
    ("name", "side", "output"),
    [
        ("cnn", 7, "image_size to 8"),
        ("resnet18", 4, "image_size to 8"),
        ("efficientnet_lite0", 8, "image_size to 16"),
        ("vit", 30, "-p5"),
        ("vit-p4-w64-h3", 28, "multiple of 3"),
        ("deit_tiny", 100, "multiple of 16"),
    ],
)
def test_images_that_do_not_fit(name: str, side: int, output: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_architecture(name, task(side))
    assert output in str(caught.value) and f"'{name}'" in str(caught.value)


def test_all_mistakes_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        check_architecture("vit-p5-w64-h3", Task("t", (), (3, 28, 28)))
    assert len(caught.value.problems) == 3


def test_one_architecture_for_all() -> None:
    assert architecture_for("cnn-w16", "anyone") == "cnn-w16"
    assert architectures_in("cnn-w16") == ("cnn-w16",)


def test_architectures_by_client() -> None:
    spec = "client-01:resnet18-w8, client-02:cnn ,*:cnn"
    assert architecture_for(spec, "client-01") == "resnet18-w8"
    assert architecture_for(spec, "client-09") == "cnn"
    assert architectures_in(spec) == ("cnn", "resnet18-w8")


@pytest.mark.parametrize(
    ("spec", "output"),
    [
        ("a:cnn", "',*:cnn'"),
        ("a:cnn,a:resnet18", "appears twice"),
        ("cnn,resnet18", "is not client:architecture"),
        ("a:,*:cnn", "is not client:architecture"),
        ("a:cnn,", "is not client:architecture"),
        ("a:cnm,*:cnn", "Did you mean cnn"),
    ],
)
def test_wrong_lists_of_clients(spec: str, output: str) -> None:
    with pytest.raises(UsageError) as caught:
        architecture_for(spec, "b")
    assert output in str(caught.value)
