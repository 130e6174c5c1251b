"""DICOM and NIfTI files as gray or color pictures of 8 bits (extra `medical`: pydicom, python-gdcm, nibabel).

Of a DICOM header only what the pixels need is read, besides three identifiers, which become numbers before anything is kept. No
message holds a value of a header, nor the text of an error of the libraries, which may quote one.
"""

from __future__ import annotations

import logging
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from osfl.core.errors import UNUSABLE, DataError
from osfl.data.reading import Slices, parse_slices, parse_window
from osfl.data.unusable import Unusable

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Notes = tuple[tuple[str, str], ...]  # (what, done)
MOST_PIXELS = 80_000_000  # of one frame or slice
MOST_BYTES = 1 << 30  # of a volume after decompression
MOST_SLICES = 10_000  # images of one file
MOST_RLE = 16 << 20  # bytes of a run-length coded frame, which may grow 64 times
BROKEN = (*UNUSABLE, OSError, EOFError, NotImplementedError, struct.error, zlib.error)
DEFLATED = (b"1.2.840.10008.1.2.1.99", b"1.2.840.10008.1.2.4.95", b"1.2.840.10008.1.2.8.1\0")  # unbounded when inflated

PIXELS = """SamplesPerPixel PhotometricInterpretation PlanarConfiguration NumberOfFrames Rows Columns BitsAllocated BitsStored
    HighBit PixelRepresentation PixelPaddingValue RescaleSlope RescaleIntercept ModalityLUTSequence WindowCenter WindowWidth
    VOILUTSequence RedPaletteColorLookupTableDescriptor GreenPaletteColorLookupTableDescriptor
    BluePaletteColorLookupTableDescriptor RedPaletteColorLookupTableData GreenPaletteColorLookupTableData
    BluePaletteColorLookupTableData SharedFunctionalGroupsSequence PerFrameFunctionalGroupsSequence ExtendedOffsetTable
    ExtendedOffsetTableLengths PixelData FloatPixelData DoubleFloatPixelData"""
PERSON = ("PatientID", "StudyInstanceUID", "SeriesInstanceUID")  # to keep a person's images together
SCALED = "no window in the header"


@dataclass(frozen=True)
class Plane:
    """One picture of a file: (height, width) or (height, width, 3), and where in the file it was."""

    pixels: Bytes
    place: str = ""  # "frame 3"; empty where the file holds one picture
    person: tuple[str, ...] = ()  # values of PERSON; only in memory
    notes: Notes = ()


def is_dicom(blob: bytes) -> bool:
    return blob[128:132] == b"DICM"


def is_nifti(name: str) -> bool:
    return name.lower().endswith((".nii", ".nii.gz"))


def _needs(package: str, what: str) -> DataError:
    return DataError(
        f"there are {what} files, and {package} is not installed here",
        field="dataset",
        fix="Install it with: pip install 'osfl[medical]'",
    )


def chosen(total: int, count: int | None) -> list[int]:
    """`count` of `total` positions, evenly spaced around the middle; None: all."""
    if count is None or count >= total:
        return list(range(total))
    return [int((k + 0.5) * total / count) for k in range(count)]


def to_bytes(values: Floats, low: float, high: float) -> Bytes:
    """`low` and below become 0, `high` and above 255."""
    span = max(high - low, 1e-12)
    shades: Bytes = np.rint(np.clip((values - low) / span, 0, 1) * 255).astype(np.uint8)
    return shades


# --- DICOM ------------------------------------------------------------------------------------------------------------


def read_dicom(blob: bytes, slices: str = "", window: str = "") -> list[Plane]:
    """The chosen frames of a file."""
    try:
        import pydicom
    except ImportError:
        raise _needs("pydicom", "DICOM") from None
    logging.getLogger("pydicom").setLevel(logging.CRITICAL + 1)  # its warnings quote the header
    if any(syntax in blob for syntax in DEFLATED):
        raise Unusable("a deflated DICOM file, whose size cannot be bounded before it is read: export it uncompressed")
    try:
        found = pydicom.dcmread(BytesIO(blob), specific_tags=[*PIXELS.split(), *PERSON])
        return list(_frames(found, parse_slices(slices), parse_window(window)))
    except (*BROKEN, pydicom.errors.InvalidDicomError, pydicom.errors.BytesLengthException) as error:
        raise Unusable("damaged DICOM file", type(error).__name__) from None  # the text may hold values of the header


def _frames(found: Any, slices: Slices, window: tuple[float, float] | None) -> Iterator[Plane]:
    total = _check_size(found)
    person = tuple(str(found.get(key, "") or "").strip() for key in PERSON)
    used = chosen(total, slices.count)[:MOST_SLICES]
    several: Notes = ()
    if total > len(used):
        several = (("several frames in a DICOM file", f"{len(used)} of them used (--slices)"),)
    for index in used:
        pixels, notes = _frame(found, index, total, window)
        yield Plane(pixels, f"frame {index + 1}" if total > 1 else "", person, (*notes, *several))


def _check_size(found: Any) -> int:
    """The number of frames, if one frame is small enough to decode."""
    if not any(key in found for key in ("PixelData", "FloatPixelData", "DoubleFloatPixelData")):
        raise Unusable("a DICOM file without pixels")
    rows, columns, total = int(found.Rows), int(found.Columns), int(found.get("NumberOfFrames") or 1)
    if min(rows, columns, total) < 1:
        raise Unusable("damaged DICOM file", "no rows, columns or frames")
    if rows * columns > MOST_PIXELS:
        raise Unusable(f"more than {MOST_PIXELS // 1_000_000} million pixels", f"{columns} × {rows}")
    return total


def _frame(
    found: Any, index: int, total: int, window: tuple[float, float] | None
) -> tuple[npt.NDArray[np.uint8], tuple[Any, ...]]:
    from pydicom.pixels.processing import apply_color_lut
    from pydicom.pixels.utils import pixel_array

    if found.file_meta.TransferSyntaxUID.is_encapsulated:
        _check_coded(found, index, total)
    stored = np.asarray(pixel_array(found, index=index))  # YBR becomes RGB here
    kind = found.PhotometricInterpretation
    if kind == "PALETTE COLOR":
        stored = np.asarray(apply_color_lut(stored, found))
    if stored.ndim == 3:
        deep = stored.dtype.itemsize > 1
        top = 65535 if kind == "PALETTE COLOR" else 2 ** int(found.BitsStored) - 1
        return (to_bytes(stored.astype(np.float32), 0, top) if deep else stored.astype(np.uint8)), ()
    pixels, notes = _gray(found, stored, index, window)
    return (255 - pixels if kind == "MONOCHROME1" else pixels), notes


def _gray(found: Any, stored: npt.NDArray[Any], index: int, window: tuple[float, float] | None) -> tuple[Bytes, Notes]:
    """Stored values, rescaled, through the window that was asked for or that the header holds."""
    from pydicom.pixels.processing import apply_modality_lut, apply_voi

    group = "PixelValueTransformationSequence"
    slope, intercept = (_number(found, index, group, key) for key in ("RescaleSlope", "RescaleIntercept"))
    if "ModalityLUTSequence" in found:
        values = np.asarray(apply_modality_lut(stored, found), dtype=np.float32)
    else:
        values = stored.astype(np.float32) * (1 if slope is None else slope) + (intercept or 0)
    if not np.isfinite(values).all():
        raise Unusable("values that are not finite")
    center, width = (_number(found, index, "FrameVOILUTSequence", key) for key in ("WindowCenter", "WindowWidth"))
    if window is None and center is not None and width is not None and width >= 1:
        window = (center, width)
    if window is not None:
        return through_window(values, *window), ()
    if "VOILUTSequence" in found:
        values = np.asarray(apply_voi(stored, found), dtype=np.float32)
        return to_bytes(values, 0, 2 ** int(found.VOILUTSequence[0].LUTDescriptor[2]) - 1), ()
    if int(found.BitsStored) <= 8 and slope is None:
        return to_bytes(values, 0, 2 ** int(found.BitsStored) - 1), ()
    real = values[stored != found.PixelPaddingValue] if isinstance(found.get("PixelPaddingValue"), int) else values
    low, high = (float(real.min()), float(real.max())) if real.size else (0.0, 1.0)
    return to_bytes(values, low, high), ((SCALED, "scaled from the smallest to the largest value of each image (--window)"),)


def through_window(values: Floats, center: float, width: float) -> Bytes:
    """The linear window of DICOM PS3.3 C.11.2.1.2: from center - 0.5 - (width - 1) / 2 to center - 0.5 + (width - 1) / 2."""
    half = (width - 1) / 2
    return to_bytes(values, center - 0.5 - half, center - 0.5 + half)


def _number(found: Any, index: int, group: str, key: str) -> float | None:
    """A number of the header; in enhanced files it is in the groups of the frame or in those that all frames share."""
    for place in (_item(found, "PerFrameFunctionalGroupsSequence", index), _item(found, "SharedFunctionalGroupsSequence", 0)):
        inner = _item(place, group, 0) if place is not None else None
        if inner is not None and inner.get(key) is not None:
            return _first(inner.get(key))
    return _first(found.get(key))


def _item(found: Any, sequence: str, index: int) -> Any:
    items = found.get(sequence)
    return items[index] if items is not None and index < len(items) else None


def _first(value: Any) -> float | None:
    """The first of several windows."""
    if value is None or value == "":
        return None
    number = float(value[0] if isinstance(value, Sequence) and not isinstance(value, str) else value)
    if not math.isfinite(number):
        raise Unusable("a DICOM header with numbers that are not finite")
    return number


def _check_coded(found: Any, index: int, total: int) -> None:
    """A compressed frame says its size, too: one that would grow beyond what the header promises is not decoded."""
    from pydicom.encaps import get_frame
    from pydicom.uid import RLELossless

    offsets = found.get("ExtendedOffsetTable"), found.get("ExtendedOffsetTableLengths")
    frame = get_frame(found.PixelData, index, number_of_frames=total, extended_offsets=offsets if all(offsets) else None)
    if found.file_meta.TransferSyntaxUID == RLELossless:
        if len(frame) > MOST_RLE:
            raise Unusable("a run-length coded frame too large to decode safely: export it uncompressed")
        return
    try:
        import gdcm  # noqa: F401  # pydicom decodes with it
    except ImportError:
        raise _needs("python-gdcm", "compressed DICOM") from None
    size = coded_size(frame)
    if size is not None and size != (int(found.Rows), int(found.Columns)):
        raise Unusable("damaged DICOM file", "the compressed image has another size than the header says")


def coded_size(frame: bytes) -> tuple[int, int] | None:
    """(rows, columns) as a JPEG, JPEG-LS or JPEG 2000 stream says them; None if it says nothing that is understood."""
    if (start := frame.find(b"\xff\x4f\xff\x51")) >= 0 and start + 28 <= len(frame):  # JPEG 2000: SIZ after SOC
        columns, rows, left, top = struct.unpack(">4I", frame[start + 8 : start + 24])
        return rows - top, columns - left
    place = 2
    while frame[:2] == b"\xff\xd8" and place + 9 <= len(frame) and frame[place] == 0xFF:
        marker, length = frame[place + 1], int.from_bytes(frame[place + 2 : place + 4], "big")
        if marker in (0xF7, *range(0xC0, 0xD0)) and marker not in (0xC4, 0xC8, 0xCC):
            rows, columns = struct.unpack(">2H", frame[place + 5 : place + 9])
            return rows, columns
        place += 1 if marker == 0xFF else 2 + length  # a marker may be filled up with FF
    return None


# --- NIfTI ------------------------------------------------------------------------------------------------------------


def read_nifti(blob: bytes, slices: str = "", window: str = "") -> list[Plane]:
    """The chosen slices of a volume, upright: up or front at the top, the left of the picture at the left."""
    try:
        import nibabel
    except ImportError:
        raise _needs("nibabel", "NIfTI") from None
    try:
        blob = _inflated(blob)
        kind = nibabel.Nifti2Image if blob[:4] in (b"\x1c\x02\0\0", b"\0\0\x02\x1c") else nibabel.Nifti1Image
        image = kind.from_bytes(blob)
        return list(_slices(image, parse_slices(slices), parse_window(window)))
    except _nibabel_errors() as error:
        raise Unusable("damaged NIfTI file", type(error).__name__) from None


def _nibabel_errors() -> tuple[type[BaseException], ...]:
    """What damaged files raise."""
    from nibabel.filebasedimages import ImageFileError
    from nibabel.spatialimages import HeaderDataError, HeaderTypeError, ImageDataError
    from nibabel.wrapstruct import WrapStructError

    return (*BROKEN, ImageFileError, HeaderDataError, HeaderTypeError, ImageDataError, WrapStructError)


def _inflated(blob: bytes) -> bytes:
    if blob[:2] != b"\x1f\x8b":
        return blob
    inflating = zlib.decompressobj(31)
    data = inflating.decompress(blob, MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise Unusable(f"more than {MOST_BYTES >> 30} GiB after decompression")
    if not inflating.eof:
        raise Unusable("damaged NIfTI file", "cut off")
    return data


def _slices(image: Any, slices: Slices, window: tuple[float, float] | None) -> Iterator[Plane]:
    import nibabel

    shape, dtype = image.shape, image.get_data_dtype()
    if len(shape) < 3 or min(shape) < 1 or dtype.kind not in "iuf":
        raise Unusable("a NIfTI file that is no gray volume")
    if int(np.prod(shape[:3], dtype=np.float64)) * dtype.itemsize > MOST_BYTES:
        raise Unusable(f"more than {MOST_BYTES >> 30} GiB")
    orientation = nibabel.io_orientation(image.affine)  # type: ignore[no-untyped-call]  # of each axis: the anatomical one, and whether it runs backwards
    if np.isnan(orientation).any():
        raise Unusable("a NIfTI file without an orientation")
    along = int(np.flatnonzero(orientation[:, 0] == slices.axis)[0])
    total = shape[along]
    used = chosen(total, slices.count)[:MOST_SLICES]
    planes = [_plane(image, along, index, orientation) for index in used]
    notes = []
    if len(shape) > 3 and max(shape[3:]) > 1:
        notes.append(("several volumes in a NIfTI file", "the first is used"))
    if len(used) < total:
        notes.append(("slices of a NIfTI volume", f"{len(used)} of them used (--slices)"))
    if not all(np.isfinite(plane).all() for plane in planes):
        raise Unusable("values that are not finite")
    low, high = min(float(p.min()) for p in planes), max(float(p.max()) for p in planes)
    if window is None:
        notes.append(("gray values of NIfTI", "scaled from the smallest to the largest value of the slices used (--window)"))
    for index, plane in zip(used, planes, strict=True):
        pixels = to_bytes(plane, low, high) if window is None else through_window(plane, *window)
        yield Plane(pixels, f"slice {index + 1}" if total > 1 else "", (), tuple(notes))


def _plane(image: Any, along: int, index: int, orientation: npt.NDArray[Any]) -> Floats:
    """One slice, counted from the left, back or bottom, as (rows, columns)."""
    where = index if orientation[along, 1] > 0 else image.shape[along] - 1 - index
    key = tuple(where if axis == along else slice(None) for axis in range(3)) + (0,) * (len(image.shape) - 3)
    plane = np.asarray(image.dataobj[key], dtype=np.float32)
    rest = [axis for axis in range(3) if axis != along]
    plane = plane[tuple(slice(None, None, int(orientation[axis, 1])) for axis in rest)]
    if orientation[rest[0], 0] > orientation[rest[1], 0]:
        plane = plane.T
    return np.ascontiguousarray(plane.T[::-1])
