"""Checkpoints of others: the names that timm and transformers give to a vision transformer's tensors, as ours.

Ours are timm's (`blocks.0.attn.qkv.weight`). In transformers' checkpoints query, key and value are three tensors, which
are one here; everything else is renamed. Files of `save_pretrained` and `state_dict()` of transformers 5 differ in naming;
training programs add prefixes of their own, often several.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from osfl.models.naming import ModelError
from osfl.runtime.payloads import DTYPES

_WRAPPERS = ("vit.", "deit.", "dinov2.", "base_model.", "model.", "module.", "model/", "_orig_mod.", "backbone.")
_UNUSED = ("embeddings.mask_token", "mask_token", "pooler.", "head_dist.", "distillation_classifier.")
_PARTS = ("query", "key", "value")
_RENAMED = (
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"encoder.layer.\1."),
    (r"^encoder\.layer\.(\d+)\.(?:norm1|layernorm_before)\.", r"blocks.\1.norm1."),
    (r"^encoder\.layer\.(\d+)\.(?:norm2|layernorm_after)\.", r"blocks.\1.norm2."),
    (r"^encoder\.layer\.(\d+)\.attention\.attention\.(query|key|value)\.", r"blocks.\1.attn.\2."),
    *((rf"^encoder\.layer\.(\d+)\.attention\.{part[0]}_proj\.", rf"blocks.\1.attn.{part}.") for part in _PARTS),
    (r"^encoder\.layer\.(\d+)\.attention\.(?:output\.dense|o_proj)\.", r"blocks.\1.attn.proj."),
    (r"^encoder\.layer\.(\d+)\.layer_scale([12])\.lambda1$", r"blocks.\1.ls\2.gamma"),
    (r"^encoder\.layer\.(\d+)\.(?:mlp\.fc1|intermediate\.dense)\.", r"blocks.\1.mlp.fc1."),
    (r"^encoder\.layer\.(\d+)\.(?:mlp\.fc2|output\.dense)\.", r"blocks.\1.mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^(?:cls_)?classifier\.", "head."),
)


def usual_names(tensors: Mapping[str, torch.Tensor], file: str) -> dict[str, torch.Tensor]:
    """The same tensors under our names; a checkpoint that has them already comes back as it is."""
    theirs = {ours: name for name in tensors if (ours := usual_name(name))}
    return _joined({ours: tensors[name] for ours, name in theirs.items()}, theirs, file)


def usual_name(name: str) -> str:
    """Our name for one tensor of theirs; empty where nothing here uses it."""
    name = _unwrapped(name)
    if name.startswith(_UNUSED):
        return ""
    for pattern, ours in _RENAMED:
        name = re.sub(pattern, ours, name)
    return name


def naming_of(names: Iterable[str]) -> str:
    """Whose naming this is: ours, transformers' or timm's."""
    found = list(names)
    if any(name.startswith("model/") for name in found):
        return "osfl"
    marks = ("encoder.layer.", "position_embeddings", ".attention.q_proj.")
    theirs = any(mark in name for name in found for mark in marks)
    return "transformers" if theirs else "timm"


def _unwrapped(name: str) -> str:
    inner = next((name.removeprefix(wrapper) for wrapper in _WRAPPERS if name.startswith(wrapper)), None)
    return name if inner is None else _unwrapped(inner)


def _joined(tensors: Mapping[str, torch.Tensor], theirs: Mapping[str, str], file: str) -> dict[str, torch.Tensor]:
    """query, key and value of each block as one `qkv`; refused by the file's own name where they are not three of a kind."""
    found: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"(blocks\.\d+\.attn\.)(query|key|value)\.(weight|bias)", name)
        if match is None:
            found[name] = value
        elif match[2] == "query":
            parts = [f"{match[1]}{part}.{match[3]}" for part in _PARTS]
            for part in parts:
                _check_alike(tensors.get(part), value, theirs.get(part, part), theirs[name], file)
            found[f"{match[1]}qkv.{match[3]}"] = torch.cat([tensors[part] for part in parts])
    return found


def _check_alike(part: torch.Tensor | None, query: torch.Tensor, name: str, query_name: str, file: str) -> None:
    if part is None or not part.ndim or part.shape != query.shape or part.dtype != query.dtype:
        raise ModelError(
            f"tensor '{name}' of {file} does not go with '{query_name}'",
            field=name,
            expected=described(query) if query.ndim else "a matrix or a vector",
            got="nothing" if part is None else described(part),
            fix="Query, key and value of a block are alike in a vision transformer: save the checkpoint again.",
        )


def described(value: torch.Tensor) -> str:
    """A tensor's kind, as messages say it: F32 [16, 3, 4, 4]."""
    return f"{DTYPES.get(value.dtype, str(value.dtype))} {list(value.shape)}"
