"""DICOM and NIfTI: the sample files inside pydicom's and nibabel's packages, and files with planted names."""

from __future__ import annotations

import gzip
import io
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from osfl.cli.main import answer
from osfl.core.errors import DataError
from osfl.data import open_dataset
from osfl.data.decode import decode
from osfl.data.decoded_files import number_people
from osfl.data.layout import arrange
from osfl.data.medical import chosen, coded_size, read_dicom, read_nifti, through_window
from osfl.data.reading import Reading
from osfl.data.unusable import Unusable

pydicom = pytest.importorskip("pydicom")
nibabel = pytest.importorskip("nibabel")
SAMPLES = Path(pydicom.__file__).parent / "data" / "test_files"
VOLUMES = Path(nibabel.__file__).parent / "tests" / "data"
PLANTED = ("Doe^Jane Planted", "PLANTED-ID-77", "19610203", "Dr. Planted", "Planted Hospital")


def _sample(name: str, **how: str) -> list[Any]:
    return [plane.pixels for plane in read_dicom((SAMPLES / name).read_bytes(), **how)]


def _stored(name: str) -> np.ndarray:
    return np.asarray(pydicom.dcmread(SAMPLES / name).pixel_array)


# --- DICOM: what pydicom's own samples look like ----------------------------------------------------------------------


def test_a_window_of_the_header_is_applied() -> None:
    """MR_small: center 600, width 1600, no rescale."""
    (pixels,) = _sample("MR_small.dcm")
    expected = np.clip((_stored("MR_small.dcm") - 599.5 + 799.5) / 1599, 0, 1) * 255
    assert pixels.shape == (64, 64) and np.abs(pixels - expected).max() <= 0.5


@pytest.mark.parametrize("kind", ["_RLE", "_bigendian", "_expb", "_implicit", "_jp2klossless", "_jpeg_ls_lossless", "_padded"])
def test_however_the_pixels_are_coded_they_are_the_same(kind: str) -> None:
    assert np.array_equal(_sample(f"MR_small{kind}.dcm")[0], _sample("MR_small.dcm")[0])


def test_rescaled_values_and_a_window_of_ones_own() -> None:
    """CT_small: slope 1, intercept -1024, no window in the header."""
    units = _stored("CT_small.dcm").astype(float) - 1024
    (shown,) = _sample("CT_small.dcm", window="40:400")
    assert np.abs(shown - np.clip((units - 39.5 + 199.5) / 399, 0, 1) * 255).max() <= 0.5
    (plane,) = read_dicom((SAMPLES / "CT_small.dcm").read_bytes())
    assert plane.notes[0][0] == "no window in the header" and (plane.pixels.min(), plane.pixels.max()) == (0, 255)


def test_the_window_is_that_of_the_standard() -> None:
    values = np.array([-1000.0, -160, 39.5, 239, 3000], dtype=np.float32)  # PS3.3 C.11.2.1.2 with center 40, width 400
    assert through_window(values, 40, 400).tolist() == [0, 0, 128, 255, 255]
    assert through_window(np.array([0.0, 1.0, 2.0], np.float32), 1.5, 1).tolist() == [0, 0, 255]


@pytest.mark.parametrize(
    "name",
    [
        "SC_rgb_dcmtk_+eb+cr.dcm",
        "SC_rgb_dcmtk_+eb+cy+np.dcm",
        "SC_rgb_dcmtk_+eb+cy+s4.dcm",
        "SC_rgb_jpeg_dcmtk.dcm",
        "SC_rgb_rle.dcm",
        "SC_ybr_full_422_uncompressed.dcm",
        "SC_rgb_rle_16bit.dcm",
        "GDCMJ2K_TextGBR.dcm",
        "examples_palette.dcm",
    ],
)
def test_colors(name: str) -> None:
    (pixels,) = _sample(name)
    assert pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.dtype == np.uint8 and pixels.max() > 150
    if name.startswith("SC_"):  # all of them show a red bar at the top
        assert pixels[5, 50, 0] > 230 and pixels[5, 50, 1:].max() < 30, pixels[5, 50]


def test_frames() -> None:
    assert len(_sample("SC_rgb_rle_2frame.dcm")) == 1 and len(_sample("SC_rgb_rle_2frame.dcm", slices="axial:all")) == 2
    middle, *_ = read_dicom((SAMPLES / "examples_ybr_color.dcm").read_bytes(), "axial:3")
    assert middle.place == "frame 6" and ("several frames in a DICOM file", "3 of them used (--slices)") in middle.notes
    assert chosen(30, 1) == [15] and chosen(30, 3) == [5, 15, 25] and chosen(4, 9) == [0, 1, 2, 3] == chosen(4, None)


def test_one_bit_and_twelve_bits() -> None:
    assert set(np.unique(_sample("liver_1frame.dcm")[0])) == {0, 255}
    assert _sample("examples_overlay.dcm")[0].max() == 255  # 12 of 16 bits, two windows: the first
    assert _sample("J2K_pixelrep_mismatch.dcm")[0].shape == (512, 512)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rtplan.dcm", "a DICOM file without pixels"),
        ("waveform_ecg.dcm", "a DICOM file without pixels"),
        ("MR_truncated.dcm", "damaged DICOM file"),
        ("image_dfl.dcm", "a deflated DICOM file"),
        ("rtplan_truncated.dcm", "a DICOM file without pixels"),
    ],
)
def test_what_is_no_image_is_left_out(name: str, why: str) -> None:
    with pytest.raises(Unusable, match=why):
        _sample(name)


# --- DICOM: files of our own ------------------------------------------------------------------------------------------


def _dicom(values: np.ndarray, path: Path | None = None, **header: Any) -> bytes:
    """An uncompressed file of 16 bits with names in every field that could hold one."""
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    one = pydicom.Dataset()
    one.file_meta = meta
    one.PatientName, one.PatientID, one.PatientBirthDate, one.ReferringPhysicianName, one.InstitutionName = PLANTED
    one.StudyInstanceUID = one.SeriesInstanceUID = "1.2.3.4"
    one.SamplesPerPixel, one.PhotometricInterpretation = 1, "MONOCHROME2"
    one.Rows, one.Columns = values.shape[-2:]
    one.BitsAllocated, one.BitsStored, one.HighBit, one.PixelRepresentation = 16, 12, 11, 0
    one.PixelData = values.astype("<u2").tobytes()
    for key, value in header.items():
        setattr(one, key, value)
    out = io.BytesIO()
    one.save_as(out, enforce_file_format=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(out.getvalue())
    return out.getvalue()


def test_monochrome1_is_turned_over() -> None:
    ramp = np.arange(64).reshape(8, 8) * 60
    dark, light = (
        read_dicom(_dicom(ramp, PhotometricInterpretation=kind))[0].pixels for kind in ("MONOCHROME1", "MONOCHROME2")
    )
    assert light[0, 0] == 0 and dark[0, 0] == 255 and np.array_equal(dark, 255 - light)


def test_padding_does_not_decide_the_scale() -> None:
    values = np.full((8, 8), 100)
    values[0], values[1] = 4000, 200
    (plane,) = read_dicom(_dicom(values, PixelPaddingValue=4000))
    assert plane.pixels[1, 0] == 255 and plane.pixels[2, 0] == 0


def test_enhanced_files_have_their_window_in_groups() -> None:
    shared, inner = pydicom.Dataset(), pydicom.Dataset()
    inner.WindowCenter, inner.WindowWidth = 1000, 1000
    shared.FrameVOILUTSequence = [inner]
    frames = np.full((2, 8, 8), 1000)
    (plane,) = read_dicom(_dicom(frames, NumberOfFrames=2, SharedFunctionalGroupsSequence=[shared]))
    assert set(plane.pixels.reshape(-1).tolist()) == {128} and plane.place == "frame 2"


@pytest.mark.filterwarnings("ignore")  # pydicom does not like what it is given to write here
@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"Rows": 0}, "damaged"),
        ({"Rows": 65535, "Columns": 65535}, "million pixels"),
        ({"Rows": 4000, "Columns": 4000}, "damaged"),
        ({"RescaleSlope": "1e400", "RescaleIntercept": "0"}, "damaged|not finite"),
        ({"NumberOfFrames": 100_000_000}, "damaged"),
        ({"BitsAllocated": 7}, "damaged"),
    ],
)
def test_headers_that_lie_are_refused(header: dict[str, Any], why: str) -> None:
    with pytest.raises(Unusable, match=why):
        read_dicom(_dicom(np.zeros((8, 8)), **header))


def test_compressed_images_may_not_grow_beyond_the_header() -> None:
    blob = bytearray((SAMPLES / "SC_rgb_jpeg_dcmtk.dcm").read_bytes())
    start = blob.index(b"\xff\xc0")
    assert struct.unpack(">2H", blob[start + 5 : start + 9]) == (100, 100)
    blob[start + 5 : start + 9] = struct.pack(">2H", 60000, 60000)
    with pytest.raises(Unusable, match="another size"):
        read_dicom(bytes(blob))
    codestream = bytearray((SAMPLES / "JPEG2000.dcm").read_bytes())
    start = codestream.index(b"\xff\x4f\xff\x51")
    assert coded_size(bytes(codestream[start:])) == (1024, 256)
    codestream[start + 8 : start + 12] = struct.pack(">I", 1 << 30)
    with pytest.raises(Unusable, match="another size"):
        read_dicom(bytes(codestream))


@pytest.mark.filterwarnings("ignore")
def test_flipped_bytes_never_escape_as_another_error() -> None:
    rng = np.random.default_rng(0)
    files = [(SAMPLES / name).read_bytes() for name in ("MR_small.dcm", "MR_small_RLE.dcm", "SC_rgb_small_odd.dcm")]
    files.append((VOLUMES / "standard.nii.gz").read_bytes())
    refused = 0
    for n in range(300):
        blob = bytearray(files[n % 4])
        for place in rng.integers(0, min(len(blob), 1500), 6):
            blob[place] = rng.integers(256)
        try:
            decode(bytes(blob), "x.nii.gz" if n % 4 == 3 else "x.dcm", 8, None)
        except Unusable:
            refused += 1
    assert refused > 30


def test_names_in_headers_reach_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log, terminal, results, report, model card, bundles, cache: the planted values are in none of them."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for number in range(24):
        path = tmp_path / "scans" / ("sick" if number % 2 else "well") / f"{number}.dcm"
        wrong = {"WindowCenter": "40", "WindowWidth": "400"} if number else {"NumberOfFrames": "9"}
        _dicom(rng.integers(0, 4096, (8, 8)), path, PatientID=f"{PLANTED[1]}-{number // 2}", **wrong)
    what = ["--dataset", "scans", "--image-size", "8", "--clients", "2", "--partition", "iid"]
    assert answer(["check", *what, "--format", "json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert any("name 12 people in 23 images" in finding["what"] for finding in findings)
    assert answer(["run", "--method", "fedavg", *what, "--smoke", "--set", "epochs=1", "--out", "out"]) == 0
    output = capsys.readouterr()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".dcm")
    for text in (output.out.encode(), output.err.encode(), caplog.text.encode(), written):
        assert not [value for value in PLANTED if value.encode() in text]
    assert len(written) > 10_000


def test_people_are_numbered_and_kept_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for number in range(40):
        header = {"PatientID": f"id-{number // 4}", "WindowCenter": 2000, "WindowWidth": 4000}
        _dicom(rng.integers(0, 4096, (8, 8)), tmp_path / "s" / f"{number % 2}" / f"{number}", **header)
    source = open_dataset(str(tmp_path / "s"), size=8)
    assert source.train.groups is not None and source.test.groups is not None
    train, test = set(source.train.groups.tolist()), set(source.test.groups.tolist())
    assert not train & test and train | test == {f"person {i + 1}" for i in range(10)}


def test_people_after_anonymization() -> None:
    same = [("ANON", f"study {i // 2}", f"series {i}") for i in range(6)]
    people, (about,) = number_people(same)
    assert people.tolist() == [0, 0, 1, 1, 2, 2] and "anonymized?" in about.done
    assert number_people([("", "", ""), ("x", "1", "2"), ("y", "1", "2")])[0].tolist() == [-1, 0, 1]
    assert number_people([("P007", "", ""), ("p7 ", "", ""), ("P8", "", "")])[0].tolist() == [0, 0, 1]
    assert number_people([("x", "1", "1")] * 3)[0].tolist() == [-1] * 3 and number_people([()])[1] == []


def test_a_series_is_a_folder_of_files_without_endings(tmp_path: Path) -> None:
    """The sample series of pydicom: no file has an ending."""
    names = [f"CT/{p.parent.name}-{p.name}" for p in (SAMPLES / "dicomdirtests/98892001").rglob("*") if p.is_file()]
    assert [item.name for item in arrange([*names, "CT/DICOMDIR", "CT/1.2.840.7", "CT/notes.txt"])[0]] == sorted(
        [*names, "CT/1.2.840.7"]
    )
    for label, folder in (("ct", "98892001/CT5N"), ("mr", "98892003/MR700")):
        for path in (SAMPLES / "dicomdirtests" / folder).iterdir():
            (tmp_path / "d" / label).mkdir(parents=True, exist_ok=True)
            (tmp_path / "d" / label / path.name).write_bytes(path.read_bytes())
    problems = open_dataset(str(tmp_path / "d"), size=8).problems
    assert not any(problem.done == "left out" for problem in problems), problems


# --- NIfTI ------------------------------------------------------------------------------------------------------------


def _volume(values: np.ndarray, affine: np.ndarray | None = None, kind: Any = None) -> bytes:
    return bytes((kind or nibabel.Nifti1Image)(values, np.eye(4) if affine is None else affine).to_bytes())


def test_slices_along_each_axis_are_upright() -> None:
    """A volume whose value is 100 x + 10 y + z in right, front, up; then the same stored with its axes turned around."""
    x, y, z = np.meshgrid(np.arange(4), np.arange(5), np.arange(6), indexing="ij")
    values = (100 * x + 10 * y + z).astype(np.float32)
    expected = {
        "axial": (100 * x + 10 * y + 3)[:, ::-1, 0].T,  # front at the top, left at the left
        "coronal": (100 * x + 20 + z)[:, 0, ::-1].T,  # up at the top
        "sagittal": (200 + 10 * y + z)[0, :, ::-1].T,
    }
    turned = np.array([[0, 0, -1, 3], [-1, 0, 0, 4], [0, 1, 0, 0], [0, 0, 0, 1]], dtype=float)  # axes: back, up, left
    stored = np.ascontiguousarray(values.transpose(1, 2, 0)[::-1, :, ::-1])
    for axis, plane in expected.items():
        for blob in (_volume(values), _volume(stored, turned), _volume(values, None, nibabel.Nifti2Image)):
            (shown,) = read_nifti(blob, axis)
            want = np.rint((plane - plane.min()) / (plane.max() - plane.min()) * 255)
            assert np.array_equal(shown.pixels, want), axis


def test_real_volumes() -> None:
    (plane,) = read_nifti((VOLUMES / "anatomical.nii").read_bytes())
    assert plane.pixels.shape == (41, 33) and plane.place == "slice 13"  # 33 × 41 × 25, left to right and back to front
    several = read_nifti((VOLUMES / "example4d.nii.gz").read_bytes(), "sagittal:4")
    assert len(several) == 4 and several[0].pixels.shape == (24, 96)
    assert ("several volumes in a NIfTI file", "the first is used") in several[0].notes
    assert len(read_nifti((VOLUMES / "example_nifti2.nii.gz").read_bytes(), "axial:all")) == 12


def test_a_window_holds_for_all_volumes() -> None:
    values = np.full((4, 4, 4), 39.5, dtype=np.float32)
    assert set(read_nifti(_volume(values), window="40:400")[0].pixels.reshape(-1).tolist()) == {128}


def test_volumes_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    holes = np.zeros((4, 4, 4), dtype=np.float32)
    holes[:, :, 2] = np.nan
    colors = np.zeros((4, 4, 4), dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
    lying = bytearray(_volume(np.zeros((4, 4, 4), np.float32)))
    lying[42:48] = struct.pack("<3h", 32767, 32767, 32767)
    for blob, why in [
        (_volume(holes), "not finite"),
        (_volume(np.zeros((4, 4), np.float32)), "no gray volume"),
        (_volume(colors), "no gray volume"),
        (bytes(lying), "GiB"),
        (b"no volume", "damaged NIfTI"),
        (gzip.compress(_volume(holes))[:60], "damaged NIfTI"),
    ]:
        with pytest.raises(Unusable, match=why):
            read_nifti(blob)
    monkeypatch.setattr("osfl.data.medical.MOST_BYTES", 1 << 20)
    with pytest.raises(Unusable, match="after decompression"):
        read_nifti(gzip.compress(bytes(8 << 20)))


def test_slices_of_one_volume_stay_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(10):
        path = tmp_path / "v" / f"{number % 2}" / f"{number}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(_volume(rng.integers(0, 99, (8, 8, 8)).astype(np.int16))))
    source = open_dataset(str(tmp_path / "v"), size=8, reading=Reading(slices="coronal:3"))
    assert len(source.train) + len(source.test) == 30 and source.train.groups is not None and source.test.groups is not None
    assert (
        not set(source.train.groups.tolist()) & set(source.test.groups.tolist()) and len(set(source.train.groups.tolist())) == 8
    )
    again = open_dataset(str(tmp_path / "v"), size=8, reading=Reading(slices="coronal:3"))  # from the cache
    assert again.digest == source.digest != open_dataset(str(tmp_path / "v"), size=8).digest


@pytest.mark.parametrize(("package", "file"), [("pydicom", "a.dcm"), ("gdcm", "b.dcm"), ("nibabel", "a.nii")])
def test_without_the_extra_one_sentence_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, file: str
) -> None:
    (tmp_path / "d" / "x").mkdir(parents=True)
    sample = {"a.dcm": "MR_small.dcm", "b.dcm": "JPEG2000.dcm"}.get(file)
    blob = (SAMPLES / sample).read_bytes() if sample else _volume(np.zeros((4, 4, 4), np.float32))
    (tmp_path / "d" / "x" / file).write_bytes(blob)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"{package} is not installed here.\nInstall it with: pip install 'osfl\\[medical\\]'"):
        open_dataset(str(tmp_path / "d"))
