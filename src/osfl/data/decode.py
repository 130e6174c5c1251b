"""Decode one image file to pixels of one size. Whatever is in the file, the result is pixels or an error message."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import PurePosixPath

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from osfl.data.medical import Plane, is_dicom, is_nifti, read_dicom, read_nifti
from osfl.data.reading import Reading
from osfl.data.unusable import Unusable

MOST_PIXELS = 80_000_000  # below the size at which Pillow begins to warn
OBLONG = 1.05  # sides that differ more than this are worth telling

# Formats that are plain pixels. Others (EPS, PDF) are programs that Pillow would have another program run.
FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF", "WEBP", "PPM")
SUFFIXES = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".bmp": "BMP",
    ".gif": "GIF",
    ".webp": "WEBP",
    ".ppm": "PPM",
    ".pgm": "PPM",
}

# What Pillow's readers raise for damaged files; a decoder can fail on garbage in any of these ways.
BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    EOFError,
    OverflowError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


@dataclass(frozen=True)
class Decoded:
    """Pixels (1 or 3, size, size): uint8, or float32 in the file's own range when `deep` (more than 8 bits)."""

    pixels: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    deep: bool
    color: bool
    oblong: bool
    notes: tuple[tuple[str, str], ...]  # (what, done)
    side: int  # of the file, in pixels; the shorter one
    place: str = ""  # which frame or slice of a volume
    person: tuple[str, ...] = ()  # identifiers of a DICOM header; they stay in memory


def decode(blob: bytes, name: str, size: int, channels: int | None, reading: Reading = Reading()) -> list[Decoded]:
    """The pictures of a file: decode, turn upright, make gray or RGB (its own choice when channels is None), resize.

    Volumes of DICOM and NIfTI hold several; every other file holds one.
    """
    if is_dicom(blob):
        planes = read_dicom(blob, reading.slices, reading.window)
    elif is_nifti(name):
        planes = read_nifti(blob, reading.slices, reading.window)
    else:
        return [_decode_picture(blob, name, size, channels)]
    return [_decode_plane(plane, size, channels) for plane in planes]


def _decode_plane(plane: Plane, size: int, channels: int | None) -> Decoded:
    picture = Image.fromarray(plane.pixels)
    width, height = picture.size
    oblong = max(width, height) > OBLONG * min(width, height)
    return _shallow(picture, list(plane.notes), size, channels, oblong, min(width, height), plane.place, plane.person)


def _decode_picture(blob: bytes, name: str, size: int, channels: int | None) -> Decoded:
    try:
        with Image.open(BytesIO(blob), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > MOST_PIXELS:
                raise Unusable(f"more than {MOST_PIXELS // 1_000_000} million pixels", f"{width} × {height}")
            return _pixels(picture, _notes(picture, name), size, channels)
    except UnidentifiedImageError:
        raise Unusable("not an image") from None
    except BROKEN as error:
        raise Unusable("damaged", str(error)) from None


def _notes(picture: Image.Image, name: str) -> list[tuple[str, str]]:
    notes = []
    promised = SUFFIXES.get(PurePosixPath(name).suffix.lower())
    if promised and picture.format not in (promised, "MPO"):
        notes.append((f"named like {promised} but holds {picture.format}", "read by its content"))
    if picture.format != "MPO" and getattr(picture, "n_frames", 1) > 1:
        notes.append(("several frames", "the first is used"))
    if picture.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        notes.append((f"{picture.mode} colors", "converted to RGB"))
    if picture.mode == "P":
        notes.append(("palette image", "converted to its colors"))
    if _transparent(picture):
        notes.append(("transparency", "laid on white"))
    return notes


def _transparent(picture: Image.Image) -> bool:
    if picture.mode.startswith(("I", "F")):
        return False
    return picture.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in picture.info


def _pixels(picture: Image.Image, notes: list[tuple[str, str]], size: int, channels: int | None) -> Decoded:
    width, height = picture.size
    oblong = max(width, height) > OBLONG * min(width, height)
    if picture.mode in ("L", "RGB"):
        # JPEG can be decoded at 1/2, 1/4, 1/8; twice the wanted size is kept for the real resizing.
        picture.draft("L" if channels == 1 else picture.mode, (2 * size, 2 * size))
    if picture.mode.startswith(("I", "F")):
        return _deep(picture, notes, size, channels, oblong)
    return _shallow(_flat(ImageOps.exif_transpose(picture)), notes, size, channels, oblong, min(width, height))


def _shallow(
    upright: Image.Image,
    notes: list[tuple[str, str]],
    size: int,
    channels: int | None,
    oblong: bool,
    side: int,
    place: str = "",
    person: tuple[str, ...] = (),
) -> Decoded:
    """Gray or RGB of 8 bits."""
    color = upright.mode != "L"
    upright = upright.convert({1: "L", 3: "RGB", None: upright.mode}[channels])
    array = np.asarray(_resized(upright, size), dtype=np.uint8)
    planes = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return Decoded(np.ascontiguousarray(planes), False, color, oblong, tuple(notes), side, place, person)


def _flat(picture: Image.Image) -> Image.Image:
    """Gray ("L") or "RGB" without transparency; a palette of greys counts as gray."""
    if _transparent(picture):
        gray = picture.mode in ("LA", "La", "L", "1")
        layers = picture.convert("RGBA")
        flat = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), layers).convert("RGB")
        return flat.convert("L") if gray else _gray_if_equal(flat)
    if picture.mode in ("1", "L"):
        return picture.convert("L")
    return _gray_if_equal(picture.convert("RGB")) if picture.mode == "P" else picture.convert("RGB")


def _gray_if_equal(picture: Image.Image) -> Image.Image:
    red, green, blue = (np.asarray(channel) for channel in picture.split())
    same = np.array_equal(red, green) and np.array_equal(green, blue)
    return picture.getchannel(0) if same else picture


def _deep(picture: Image.Image, notes: list[tuple[str, str]], size: int, channels: int | None, oblong: bool) -> Decoded:
    """More than 8 bits: kept as float32 until the range of the whole dataset is known."""
    side, values = min(picture.size), np.asarray(picture, dtype=np.float32)
    if not np.isfinite(values).all() or values.min() < 0:
        raise Unusable("values below 0 or not finite (scanner units?): export a window of 0..255 first")
    plane = np.clip(np.asarray(_resized(Image.fromarray(values), size), dtype=np.float32), 0, None)
    notes.append(("more than 8 bits", "scaled to 8 bits by the range of all such files"))
    return Decoded(np.repeat(plane[None], channels or 1, axis=0), True, False, oblong, tuple(notes), side)


def _resized(picture: Image.Image, size: int) -> Image.Image:
    if picture.size == (size, size):
        return picture
    return picture.resize((size, size), Image.Resampling.BILINEAR)  # antialiased when shrinking


def full_scale(largest: float) -> float:
    """The value that means white: of 8, 12 (scanners) or 16 bits, or 1.0 for fractions."""
    for scale in (1.0, 255.0, 4095.0, 65535.0):
        if largest <= scale:
            return scale
    return largest
