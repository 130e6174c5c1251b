"""Images as tokens: windows, views, a store that never encodes twice, and encoders pinned by hash."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from osfl.core.errors import RoundError
from osfl.core.seeds import torch_generator
from osfl.core.types import Payload, Task, Upload
from osfl.ingredients.tokens import encoding as tokens_file
from osfl.ingredients.tokens import store as store_file
from osfl.ingredients.tokens.encoding import Encoding, Tokenizer, same_encoder, token_problems, views, window_places
from osfl.ingredients.tokens.store import Apart, TokenStore, features_apart, image_digests, share_kept
from osfl.models.build import build_model
from osfl.models.checkpoints import usual_names
from osfl.models.encoder_table import ENCODERS
from osfl.models.encoders import encoder_problems, encoder_width, load_encoder
from osfl.models.naming import ModelError, named
from osfl.models.pretrained import weights_path
from osfl.models.weights_table import IMAGENET
from osfl.runtime.meter import measure
from osfl.runtime.workers import compute_threads

SMALL = Encoding("random", resolution=16, window=8, stride=8)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def images(n: int, channels: int = 1, side: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, side, side), generator=torch_generator(0, "images"), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("geometry", "count"),
    [((448, 224, 224), 4), ((448, 224, 112), 9), ((500, 224, 224), 9), ((224, 224, 224), 0), ((100, 224, 224), 0)],
)
def test_windows(geometry: tuple[int, int, int], count: int) -> None:
    places = window_places(*geometry)
    assert len(places) ** 2 == count == Encoding("random", "", "", *geometry).regions()
    assert not places or places[-1] + geometry[1] == geometry[0]


def test_four_windows_tile_the_image() -> None:
    x = torch.rand(2, 3, 16, 16) * 2 - 1
    seen = views(x, SMALL)
    assert seen.shape == (2, 5, 3, 8, 8)
    rows = [torch.cat([seen[:, 1], seen[:, 2]], 3), torch.cat([seen[:, 3], seen[:, 4]], 3)]
    assert torch.equal(torch.cat(rows, 2), x)


def test_gray_is_repeated_and_a_constant_image_has_one_token() -> None:
    x = torch.full((1, 1, 16, 16), 0.5)
    assert torch.equal(views(x, SMALL), views(x.expand(-1, 3, -1, -1), SMALL))
    found = Tokenizer(SMALL)(x)
    assert found.shape == (1, 5, 224) and torch.allclose(found, found[:, :1].expand_as(found), atol=1e-6)


def test_encoding_twice_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures, tokenizer = images(7), Tokenizer(SMALL)
    first = tokenizer.tokens(pictures)

    def forbidden(*_: object) -> torch.Tensor:
        raise AssertionError("encoded again")

    monkeypatch.setattr(Tokenizer, "_encoded", forbidden)
    assert torch.equal(Tokenizer(SMALL).tokens(pictures.flip(0)), first.flip(0))
    with pytest.raises(AssertionError, match="encoded again"):
        Tokenizer(Encoding("random", resolution=16, window=8, stride=4)).tokens(pictures)  # another geometry


def test_features_that_are_kept_make_no_rehearsal_cheaper(tmp_path: Path) -> None:
    """Neither the user's, which are not read, nor those of an earlier rehearsal: each pays once for each image."""
    tokenizer, pictures, apart, costs = Tokenizer(SMALL), images(5), Apart(tmp_path), []
    tokenizer.tokens(pictures[:3])
    for shown in (slice(0, 4), slice(0, 4), slice(1, 2)):
        with features_apart(apart), measure() as meter:
            first = tokenizer.tokens(pictures[shown])
            assert torch.equal(first, tokenizer.tokens(pictures[shown]))
        costs.append(meter)
    assert costs[0].flops == costs[1].flops == pytest.approx(4 * costs[2].flops) and costs[2].flops > 0
    assert costs[1].seconds >= sum(seconds for seconds, *_ in apart.costs.values()) > 0
    assert share_kept(apart) == pytest.approx(3 / 4)  # of the four that were tried, three are the user's


def test_an_image_has_the_same_token_in_any_company() -> None:
    pictures, tokenizer = images(5), Tokenizer(SMALL)
    together = tokenizer.tokens(pictures)
    alone = torch.cat([tokenizer._encoded(p.unsqueeze(0).float() / 127.5 - 1) for p in pictures])
    assert torch.equal(together, alone)


def test_tokens_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are kept for all: `osfl predict`, with every core, may be the first to encode an image."""
    found = []
    for threads in (1, 4):
        monkeypatch.setenv("OSFL_CACHE", str(tmp_path / f"{threads}"))
        load_encoder.cache_clear()
        with compute_threads(threads):
            found.append(Tokenizer(Encoding(encoder="random", window=112, resolution=112)).tokens(images(2)))
            assert torch.get_num_threads() == threads
    load_encoder.cache_clear()
    assert torch.equal(*found)


def test_an_interrupted_encoding_goes_on_behind_its_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_file, "BLOCK", 2)
    pictures, tokenizer, calls = images(6), Tokenizer(SMALL), []
    plain = Tokenizer._encoded

    def counted(self: Tokenizer, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return plain(self, x)

    monkeypatch.setattr(Tokenizer, "_encoded", counted)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.tokens(pictures)
    tokenizer.tokens(pictures)
    assert len(calls) == 4 + 4  # two of six images were kept


def test_a_damaged_block_is_encoded_again(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    digests = image_digests(images(2))
    store.put(digests, torch.zeros(2, 1, 3))
    next(tmp_path.glob("*.safetensors")).write_bytes(b"torn")
    again = TokenStore(tmp_path)
    assert again.missing(digests) == [0, 1]
    assert store.missing([digests[0], digests[0], digests[1]]) == [0, 2]  # each image once
    again.put(digests, torch.ones(2, 1, 3))
    assert again.missing(digests) == [] and torch.equal(again.get(digests), torch.ones(2, 1, 3))


def test_blocks_may_be_deleted_while_somebody_works(tmp_path: Path) -> None:
    store, digests = TokenStore(tmp_path), image_digests(images(2))
    store.put(digests, torch.zeros(2, 1, 3))
    assert store.missing(digests) == []
    next(tmp_path.glob("*.safetensors")).unlink()
    assert store.missing(digests) == [0, 1]


def test_many_questions_look_through_the_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thousand sites each question would go through the blocks of all: quadratic."""
    looked: list[str] = []
    for name, module in (("trim", store_file), ("scandir", os)):
        before = getattr(module, name)

        def watched(*given: object, name: str = name, before: Callable[..., object] = before) -> object:
            looked.append(name)
            return before(*given)

        monkeypatch.setattr(module, name, watched)
    monkeypatch.setattr("osfl.runtime.cache._files", lambda folders: iter(()))
    digests = image_digests(images(5))
    store_file.store_of("c" * 64).put(digests, torch.arange(5.0).view(5, 1, 1))
    os.utime(store_file.store_of("c" * 64).folder, (1, 1))  # a folder that changed just now is looked at again
    for _ in range(20):
        store = store_file.store_of("c" * 64)
        assert not store.missing(digests) and store.get(digests).flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert looked == ["trim", "scandir"]
    other = image_digests(images(7)[5:])
    store.put(other, torch.ones(2, 1, 1))
    os.utime(store.folder, (2, 2))
    assert not store.missing([*digests, *other]) and looked == ["trim", "scandir", "scandir"]
    monkeypatch.setenv("OSFL_CACHE_LIMIT", "1e-7")  # 100 bytes: whatever is written, the limit is looked after
    store.put(image_digests(images(8)[7:]), torch.ones(1, 1, 1))
    assert looked == ["trim", "scandir", "scandir", "trim"]


def test_encoders_are_as_wide_as_they_say() -> None:
    assert load_encoder("random", 8).network(torch.zeros(2, 3, 8, 8)).shape == (2, ENCODERS["random"].width)


@pytest.mark.data
@pytest.mark.parametrize("name", ["efficientnet_lite0", "efficientnet_lite0_320", "vit_small_saliency"])
def test_pretrained_encoders_load(name: str) -> None:
    try:
        weights_path(ENCODERS[name].weights)
    except ModelError as missing:
        pytest.skip(f"{missing}")
    encoder = load_encoder(name, 56)
    found = encoder.network(torch.rand(2, 3, 56, 56) * 2 - 1)
    assert found.shape == (2, encoder.width) == (2, ENCODERS[name].width) and bool(found.isfinite().all())


def test_a_missing_weights_file_says_what_to_fetch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OSFL_DATA", str(tmp_path))
    with pytest.raises(ModelError, match=r"sha256 8d9dcb36.*(?s:.)*OSFL_DATA"):
        load_encoder("efficientnet_lite0", 72)
    with pytest.raises(ModelError, match="a file with sha256 " + "0" * 64):
        load_encoder("dinov2_small", 70, "nowhere.safetensors", "0" * 64)


def test_settings_of_encoders_are_checked() -> None:
    assert "expected one of random" in encoder_problems("resnet", 224, "", "")[0]
    assert "multiple of 14" in encoder_problems("dinov2_base", 225, "x.safetensors", "0" * 64)[0]
    assert "needs a safetensors file" in encoder_problems("dinov2_base", 224, "", "")[0]
    assert "64 lower-case hex" in encoder_problems("dinov2_base", 224, "x.safetensors", "abc")[0]
    assert "weights of its own" in encoder_problems("efficientnet_lite0", 224, "x.safetensors", "0" * 64)[0]
    assert "'stride'" in token_problems(Encoding("random", stride=0))[0]


def transformers_style(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names that a DINOv2 checkpoint of transformers has."""
    found = {"embeddings.mask_token": torch.zeros(1, 3)}
    for name, value in state.items():
        for ours, theirs in (
            ("cls_token", "embeddings.cls_token"),
            ("pos_embed", "embeddings.position_embeddings"),
            ("patch_embed.proj.", "embeddings.patch_embeddings.projection."),
            ("blocks.", "encoder.layer."),
            (".attn.proj.", ".attention.output.dense."),
            (".ls1.gamma", ".layer_scale1.lambda1"),
            (".ls2.gamma", ".layer_scale2.lambda1"),
        ):
            name = name.replace(ours, theirs)
        name = name.replace("norm.", "layernorm.") if name.startswith("norm.") else name
        if ".attn.qkv." in name:
            for part, piece in zip(("query", "key", "value"), value.chunk(3), strict=True):
                found[f"dinov2.{name.replace('.attn.qkv.', f'.attention.attention.{part}.')}"] = piece.clone()
        elif not name.startswith("head."):
            found[f"dinov2.{name}"] = value
    return found


def test_checkpoints_of_transformers_load_like_our_own(tmp_path: Path) -> None:

    model = build_model("vit_small_dinov2", Task("t", ("a",), (3, 28, 28)), torch_generator(0, "vit"))
    state = {name.removeprefix("m/"): tensor for name, tensor in named(model, "m").items()}
    plain = {name: value for name, value in state.items() if not name.startswith("head.")}
    renamed = usual_names(transformers_style(state), "a file")
    assert renamed.keys() == plain.keys() and all(torch.equal(renamed[n], plain[n]) for n in plain)
    answers = []
    for number, tensors in enumerate((plain, transformers_style(state))):
        path = tmp_path / f"{number}.safetensors"
        save_file(tensors, path)
        encoder = load_encoder("dinov2_small", 28, str(path), sha256(path.read_bytes()).hexdigest())
        answers.append(encoder.network(torch.full((1, 3, 28, 28), 0.3)))
    assert torch.equal(*answers)
    with pytest.raises(ModelError, match="not the ones that were pinned"):
        load_encoder("dinov2_small", 28, str(path), "1" * 64)


@pytest.mark.parametrize("output", ["0" * 64, None])
def test_another_encoder_than_the_plans_is_named_with_its_client(output: str | None) -> None:
    settings = Encoding(encoder="random", window=8, resolution=8)
    right = Tokenizer(settings).digest
    uploads = [Upload(c, "", Payload({}, {"encoder": e} if e else {})) for c, e in (("a", right), ("b", output), ("c", output))]
    same_encoder(uploads[:1], settings)
    with pytest.raises(RoundError, match="another encoder") as caught:
        same_encoder(uploads, settings)  # most have it, and are wrong all the same
    assert caught.value.client == "b" and caught.value.expected == right


@pytest.mark.parametrize("name", ["resnet18-w8", "cnn-w8", "vit-p4-w16-h2-d2"])
def test_any_architecture_is_an_encoder_with_a_file(tmp_path: Path, name: str) -> None:
    model = build_model(name, Task("t", ("a", "b"), (3, 16, 16)), torch.Generator().manual_seed(0)).eval()
    save_file({n.removeprefix("m/"): t.contiguous() for n, t in named(model, "m").items()}, tmp_path / "w.safetensors")
    pinned = sha256((tmp_path / "w.safetensors").read_bytes()).hexdigest()
    x = torch.rand(2, 3, 16, 16) * 2 - 1
    own = load_encoder(name, 16, str(tmp_path / "w.safetensors"), pinned, "symmetric")
    with torch.no_grad():
        assert torch.allclose(own.network(x), model.features(x), atol=1e-5)
        assert own.width == encoder_width(name, 16) == own.network(x).shape[1]
        usual = load_encoder(name, 16, str(tmp_path / "w.safetensors"), pinned)
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET)
        assert torch.allclose(usual.network(x), model.features((0.5 * (x + 1) - mean) / deviation), atol=1e-4)
    assert usual.digest != own.digest


def test_a_hub_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=fails))
    with pytest.raises(ModelError, match="no route to host") as caught:
        load_encoder("dinov2_small", 28, "hub:owner/name", "0" * 64)
    assert caught.value.field == "encoder_weights" and "carry the file" in str(caught.value.fix)


def test_a_file_of_the_hub_is_checked_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def gives(repository: str, file: str, revision: str | None) -> str:
        asked.append((repository, file, revision))
        (tmp_path / "w.safetensors").write_bytes(b"another file")
        return str(tmp_path / "w.safetensors")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=gives))
    with pytest.raises(ModelError, match="not the ones that were pinned"):
        load_encoder("dinov2_small", 28, "hub:owner/name@v1:deep/file.safetensors", "0" * 64)
    assert asked == [("owner/name", "deep/file.safetensors", "v1")]
