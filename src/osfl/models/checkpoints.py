"""Checkpoints of others: the names that timm and transformers give to a vision transformer's tensors, as ours.

Ours are timm's (`blocks.0.attn.qkv.weight`). In transformers' checkpoints query, key and value are three tensors, which
are one here; everything else is renamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

_WRAPPERS = ("vit.", "deit.", "dinov2.", "base_model.", "model.", "module.", "model/")
_UNUSED = ("embeddings.mask_token", "mask_token", "pooler.", "head_dist.", "distillation_classifier.")
_RENAMED = (
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^encoder\.layer\.(\d+)\.(?:norm1|layernorm_before)\.", r"blocks.\1.norm1."),
    (r"^encoder\.layer\.(\d+)\.(?:norm2|layernorm_after)\.", r"blocks.\1.norm2."),
    (r"^encoder\.layer\.(\d+)\.attention\.attention\.(query|key|value)\.", r"blocks.\1.attn.\2."),
    (r"^encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"blocks.\1.attn.proj."),
    (r"^encoder\.layer\.(\d+)\.layer_scale([12])\.lambda1$", r"blocks.\1.ls\2.gamma"),
    (r"^encoder\.layer\.(\d+)\.(?:mlp\.fc1|intermediate\.dense)\.", r"blocks.\1.mlp.fc1."),
    (r"^encoder\.layer\.(\d+)\.(?:mlp\.fc2|output\.dense)\.", r"blocks.\1.mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^(?:cls_)?classifier\.", "head."),
)


def usual_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors under our names; a checkpoint that has them already comes back as it is."""
    renamed = {usual_name(name): value for name, value in tensors.items()}
    return _joined({name: value for name, value in renamed.items() if name})


def usual_name(name: str) -> str:
    """Our name for one tensor of theirs; empty where nothing here uses it."""
    name = _unwrapped(name)
    if name.startswith(_UNUSED):
        return ""
    for pattern, ours in _RENAMED:
        name = re.sub(pattern, ours, name)
    return name


def naming_of(names: Iterable[str]) -> str:
    """Whose words these are: ours, transformers' or timm's."""
    found = list(names)
    if any(name.startswith("model/") for name in found):
        return "osfl"
    theirs = any("encoder.layer." in name or "position_embeddings" in name for name in found)
    return "transformers" if theirs else "timm"


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def _joined(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """query, key and value of each block as one `qkv`."""
    found: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"(blocks\.\d+\.attn\.)(query|key|value)\.(weight|bias)", name)
        if match is None:
            found[name] = value
        elif match[2] == "query":
            parts = [tensors.get(f"{match[1]}{part}.{match[3]}") for part in ("query", "key", "value")]
            found[f"{match[1]}qkv.{match[3]}"] = torch.cat([part for part in parts if part is not None])
    return found
