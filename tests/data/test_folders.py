"""Folders, zips and tables of images, with everything that is wrong in real ones."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from osfl.core.errors import DataError
from osfl.core.result import finding_line
from osfl.data import Problem, grouped, open_dataset
from osfl.data.decode import decode
from osfl.data.layout import arrange
from osfl.data.reading import Reading
from osfl.data.unusable import Unusable
from osfl.simulate.simulation import Simulation, prepare

Folder = Callable[..., Path]
Picture = Callable[..., Image.Image]


def _names(pattern: str, n: int = 10) -> list[str]:
    return [pattern.format(i) for i in range(n)]


def test_classes_are_folders_and_a_fifth_is_the_test_part(image_folder: Folder) -> None:
    root = image_folder(*_names("cat/{}.png"), *_names("dog/{}.jpg", 20))
    source = open_dataset(str(root), size=8)
    assert (source.name, source.classes, source.image) == ("images", ("cat", "dog"), (3, 8, 8))
    assert (len(source.train), len(source.test), source.val) == (24, 6, None)
    assert np.bincount(source.test.labels).tolist() == [2, 4] and source.problems == ()
    assert source.train.domains is None and source.train.groups is None
    assert open_dataset(str(root)).image == (3, 64, 64)


def test_own_parts_are_kept(image_folder: Folder) -> None:
    names = [*_names("train/cat/{}.png"), *_names("train/dog/{}.png"), *_names("Val/cat/{}.png", 3)]
    source = open_dataset(str(image_folder(*names, *_names("testing/dog/{}.png", 4))), size=8)
    assert source.val is not None
    assert (len(source.train), len(source.val), len(source.test)) == (20, 3, 4)


def test_domains_hold_the_same_classes(image_folder: Folder) -> None:
    names = [f"{d}/{c}/{i}.png" for d in ("photo", "sketch") for c in ("cat", "dog") for i in range(10)]
    source = open_dataset(str(image_folder(*names)), size=8)
    assert source.classes == ("cat", "dog") and source.train.domains is not None and source.test.domains is not None
    assert Counter(zip(source.test.labels.tolist(), source.test.domains.tolist(), strict=True)) == Counter(
        {(c, d): 2 for c in (0, 1) for d in ("photo", "sketch")}
    )


def test_a_domain_split_of_its_own() -> None:
    items, _ = arrange([f"{p}/{d}/{c}/1.png" for p in ("train", "test") for d in "xy" for c in ("cat", "dog")])
    assert {(i.part, i.domain, i.label) for i in items} == {
        (p, d, c) for p in ("train", "test") for d in "xy" for c in ("cat", "dog")
    }


def test_inner_folders_that_differ_are_patients() -> None:
    items, problems = arrange([f"{c}/{c}{p}/{i}.png" for c in ("sick", "well") for p in range(3) for i in range(2)])
    assert {i.label for i in items} == {"sick", "well"} and len({i.group for i in items}) == 6
    assert problems[0].done == "taken as groups, e.g. patients"


def test_a_folder_around_everything_is_seen_through() -> None:
    items, _ = arrange(["set-1/cat/a.png", "set-1/dog/b.png"])
    assert {(i.label, i.domain) for i in items} == {("cat", ""), ("dog", "")}
    assert [i.label for i in arrange(["cat/a.png", "cat/b.png"])[0]] == ["cat", "cat"]
    assert [i.part for i in arrange(["train/cat/a.png", "train/dog/b.png"])[0]] == ["train", "train"]


def test_what_does_not_fit_is_named() -> None:
    names = ["cat/a.png", "dog/b.png", "stray.png", "cat/deep/er/c.png", "dog/readme.txt", "../escape/d.png", "/abs/e.png"]
    items, problems = arrange(names)
    assert [i.name for i in items] == ["cat/a.png", "dog/b.png"]
    assert {p.path: p.what for p in problems} == {
        "stray.png": "not inside a class folder",
        "cat/deep/er/c.png": "3 folders deep, others 1",
        "dog/readme.txt": "not an image file",
        "../escape/d.png": "a name that points outside",
        "/abs/e.png": "a name that points outside",
    }


def _saved(picture: Image.Image, kind: str, **options: object) -> bytes:
    out = BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def _strange(picture: Picture) -> dict[str, tuple[bytes, str, str]]:
    """name -> (file, what the report says, what was done)."""
    rgba = picture("RGBA")
    rgba.putalpha(100)
    jpeg = _saved(picture(size=(64, 64)), "JPEG")
    deep = np.linspace(0, 60000, 144).reshape(12, 12)
    below = np.full((12, 12), -3.0, np.float32)
    frames = [picture(number=i).convert("P") for i in (1, 2)]
    bomb = Image.new("1", (12000, 9000))
    return {
        "cmyk.jpg": (_saved(picture("CMYK"), "JPEG"), "CMYK colors", "converted to RGB"),
        "palette.png": (_saved(picture("P"), "PNG"), "palette image", "converted to its colors"),
        "alpha.png": (_saved(rgba, "PNG"), "transparency", "laid on white"),
        "gray-alpha.png": (_saved(picture("LA"), "PNG"), "transparency", "laid on white"),
        "deep.png": (
            _saved(Image.fromarray(deep.astype(np.uint16)), "PNG"),
            "more than 8 bits",
            "scaled to 8 bits by the range of all such files",
        ),
        "float.tif": (_saved(Image.fromarray(below), "TIFF"), "values below 0", "left out"),
        "frames.gif": (
            _saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
            "several frames",
            "the first is used",
        ),
        "liar.png": (jpeg, "named like PNG but holds JPEG", "read by its content"),
        "cut.jpg": (jpeg[:-300], "damaged", "left out"),
        "cut.png": (_saved(picture(), "PNG")[:200], "damaged", "left out"),
        "text.jpg": (b"this is no picture", "not an image", "left out"),
        "empty.jpg": (b"", "not an image", "left out"),
        "script.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image", "left out"),
        "huge.png": (_saved(bomb, "PNG"), "more than 80 million pixels", "left out"),
        "notes.txt": (b"hello", "not an image file", "left out"),
    }


@pytest.fixture
def strange_zip(tmp_path: Path, picture: Picture) -> Path:
    path = tmp_path / "strange.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(8):
            archive.writestr(f"good/{i}.png", _saved(picture(number=i), "PNG"))
            archive.writestr(f"odd/plain{i}.bmp", _saved(picture(number=20 + i), "BMP"))
        for name, (blob, _, _) in _strange(picture).items():
            archive.writestr(f"odd/{name}", blob)
        archive.writestr("__MACOSX/odd/._a.png", b"x")
        archive.writestr("odd/.DS_Store", b"x")
        archive.writestr("odd/Thumbs.db", b"x")
    return path


def test_strange_files_are_reported_and_never_crash(strange_zip: Path, picture: Picture) -> None:
    source = open_dataset(str(strange_zip), size=8)
    reported = {(p.path.removeprefix("odd/"), p.done): p.what for p in source.problems}
    strange = _strange(picture)
    for name, (_, what, done) in strange.items():
        assert reported[name, done].startswith(what), name
    used = sum(done != "left out" for _, _, done in strange.values())
    assert len(source.train) + len(source.test) == 16 + used
    assert not any("MACOSX" in p.path or "DS_Store" in p.path for p in source.problems)
    mixed = [p for p in source.problems if p.path == "(all)"]
    assert len(mixed) == 1 and "gray: good 0%" in mixed[0].what


def test_the_report_is_a_line_for_each_kind() -> None:
    same = [Problem(f"{i}.png", "palette image", "converted") for i in range(5)]
    lines = [finding_line(one) for one in grouped([*same, Problem("x.txt", "not an image file", "left out")])]
    assert lines == [
        "palette image: 5 × converted (0.png, 1.png, 2.png, …)",
        "not an image file: 1 × left out (x.txt)",
    ]


def _pixels(tmp_path: Path, *files: tuple[str, bytes], channels: int | None = None) -> dict[str, np.ndarray]:
    """Decoded files by name; each twice (as two classes) so that there is a test part, which is ignored here."""
    return {name: decode(blob, name, 12, channels)[0].pixels for name, blob in files}


def test_sixteen_bits_use_the_range_of_all_files(tmp_path: Path) -> None:
    root = tmp_path / "deep"
    for label, value in (("a", 1000), ("b", 4000)):
        (root / label).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(np.full((8, 8), value, np.uint16)).save(root / label / f"{i}.png")
    source = open_dataset(str(root), size=8)
    shades = {
        int(label): int(image[0, 0, 0]) for image, label in zip(source.train.dataset.images, source.train.labels, strict=True)
    }
    assert source.image == (1, 8, 8) and shades == {0: 62, 1: 249}  # 12 bits: 1000/4095 and 4000/4095 of 255


def test_transparent_is_white_and_palettes_keep_their_colors(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (12, 12), (10, 20, 30, 0))
    palette = Image.new("P", (12, 12), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    pixels = _pixels(tmp_path, ("clear.png", _saved(clear, "PNG")), ("p.png", _saved(palette, "PNG")))
    assert np.unique(pixels["clear.png"]).tolist() == [255]
    assert pixels["p.png"][:, 0, 0].tolist() == [200, 100, 50]


def test_gray_only_if_all_are_gray(image_folder: Folder, picture: Picture) -> None:
    root = image_folder(*_names("a/{}.png", 4), *_names("b/{}.png", 4), mode="L")
    assert open_dataset(str(root), size=8).image == (1, 8, 8)
    assert open_dataset(str(root), size=8, channels=3).image == (3, 8, 8)
    picture("RGB").save(root / "a" / "color.png")
    source = open_dataset(str(root), size=8)
    assert source.image == (3, 8, 8) and "8 of 9 images are gray" in source.problems[0].what
    assert open_dataset(str(root), size=8, channels=1).problems == ()


def test_oblong_images_are_squeezed_and_upright(tmp_path: Path, picture: Picture) -> None:
    root = tmp_path / "wide"
    (root / "a").mkdir(parents=True)
    for i in range(4):
        picture(number=i, size=(20, 10)).save(root / "a" / f"{i}.png")
    source = open_dataset(str(root), size=8)
    assert source.image == (3, 8, 8) and source.problems[0].what == "4 of 4 images are not square"
    turned = Image.new("RGB", (20, 20), "black")
    turned.paste("white", (0, 0, 20, 10))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    pixels = _pixels(tmp_path, ("x.jpg", _saved(turned, "JPEG", exif=exif)))["x.jpg"]
    assert pixels[:, 0].max() < 50 and pixels[:, -1].min() > 200


def test_jpeg_is_shrunk_while_decoding_to_nearly_the_same(picture: Picture) -> None:
    smooth = picture(size=(6, 6)).resize((384, 384), Image.Resampling.BICUBIC)
    blob = _saved(smooth, "JPEG", quality=95)
    quick = decode(blob, "x.jpg", 24, None)[0].pixels
    slow = np.asarray(Image.open(BytesIO(blob)).resize((24, 24), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert np.abs(quick.astype(int) - slow.astype(int)).mean() < 3


def test_the_same_picture_twice(image_folder: Folder) -> None:
    root = image_folder(*_names("train/cat/{}.png", 4), *_names("train/dog/{}.png", 4))
    (root / "test" / "dog").mkdir(parents=True)
    for target in ("train/dog/wrong.png", "test/dog/leak.png"):
        (root / target).write_bytes((root / "train/cat/1.png").read_bytes())
    (root / "test" / "dog" / "again.png").write_bytes((root / "train/dog/2.png").read_bytes())
    problems = {p.path: p.what for p in open_dataset(str(root), size=8).problems if "same" in p.what}
    assert "another class" in problems["train/dog/wrong.png"] and "another part" in problems["train/dog/2.png"]


def test_nothing_usable(tmp_path: Path) -> None:
    (tmp_path / "void" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="no usable image"):
        open_dataset(str(tmp_path / "void"))
    (tmp_path / "void" / "a" / "x.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"no usable image \(not an image: 1 × left out \(a/x.png\)\)"):
        open_dataset(str(tmp_path / "void"))
    (tmp_path / "bad.zip").write_bytes(b"PK but not a zip")
    with pytest.raises(DataError, match="cannot be read as a zip"):
        open_dataset(str(tmp_path / "bad.zip"))


def test_one_image_is_not_a_dataset(image_folder: Folder) -> None:
    with pytest.raises(DataError, match="1 training and 0 test images"):
        open_dataset(str(image_folder("a/0.png")))


def test_a_zip_bomb_is_left_out(tmp_path: Path, picture: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osfl.data.tree.LARGEST_FILE", 100_000)
    with zipfile.ZipFile(tmp_path / "z.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(4):
            archive.writestr(f"a/{i}.png", _saved(picture(number=i), "PNG"))
        archive.writestr("a/bomb.png", b"\0" * 1_000_000)
    source = open_dataset(str(tmp_path / "z.zip"), size=8)
    assert [(p.path, p.what, p.detail) for p in source.problems] == [("a/bomb.png", "unreadable", "larger than 100,000 bytes")]


def test_folder_and_zip_give_the_same_digest(image_folder: Folder, tmp_path: Path) -> None:
    root = image_folder(*_names("cat/{}.png"), *_names("dog/{}.jpg"))
    with zipfile.ZipFile(tmp_path / "same.zip", "w") as archive:
        for path in sorted(root.rglob("*.*"), reverse=True):
            archive.write(path, path.relative_to(root).as_posix())
    assert open_dataset(str(root), size=8).digest == open_dataset(str(tmp_path / "same.zip"), size=8).digest


def test_table(image_folder: Folder) -> None:
    root = image_folder(*_names("{}.png", 20))
    rows = [f"{i}.png,{i % 2 + 9},{'test' if i >= 16 else 'train'},site{i % 3},p{i // 4}" for i in range(20)]
    (root / "t.csv").write_text("\ufeffPath, Label ,split,domain,group\n" + "\n".join(rows), encoding="utf-8")
    source = open_dataset(str(root / "t.csv"), size=8)
    assert (source.classes, len(source.train), len(source.test)) == (("9", "10"), 16, 4)
    assert source.train.groups is not None and sorted(set(source.train.groups.tolist())) == ["p0", "p1", "p2", "p3"]
    assert source.test.domains is not None and set(source.test.domains.tolist()) == {"site0", "site1", "site2"}


def test_table_keeps_groups_together_when_it_cuts(image_folder: Folder) -> None:
    root = image_folder(*_names("{}.png", 40))
    rows = [f"{i}.png,{i % 2},p{i // 4}" for i in range(40)]
    (root / "t.csv").write_text("path,label,group\n" + "\n".join(rows))
    source = open_dataset(str(root / "t.csv"), size=8)
    assert source.train.groups is not None and source.test.groups is not None
    assert not set(source.train.groups.tolist()) & set(source.test.groups.tolist()) and len(source.test) == 8


def test_table_with_mistakes(image_folder: Folder) -> None:
    root = image_folder(*_names("{}.png", 8))
    good = "".join(f"{i}.png,a,\n" for i in range(4)) + "".join(f"{i}.png,b,\n" for i in range(4, 8))
    (root / "t.csv").write_text(f"path,label,split\n{good}gone.png,a,\n,a,\n1.png,,\n0.png,a,\n5.png,a,\n6.png,b,later\n")
    source = open_dataset(str(root / "t.csv"), size=8)
    found = {p.path: p.what for p in source.problems}
    assert ("gone.png", "No such file or directory") in [(p.path, p.detail) for p in source.problems]
    assert found["t.csv:11"] == "no path" and found["t.csv:12"] == "no label" and "later" in found["t.csv:15"]
    assert found["0.png"] == "listed twice" and found["5.png"] == "listed with more than one label"
    assert len(source.train) + len(source.test) == 7
    (root / "h.csv").write_text("file,class\nx,y\n")
    with pytest.raises(DataError, match="columns 'path' and 'label'"):
        open_dataset(str(root / "h.csv"))
    (root / "long.csv").write_text("path,label\n" + "x" * 200_000 + ",1\n")
    with pytest.raises(DataError, match="cannot be read as CSV"):
        open_dataset(str(root / "long.csv"))
    (root / "u.csv").write_bytes(b"path,label\n\xff\xfe,1\n")
    with pytest.raises(DataError, match="UTF-8"):
        open_dataset(str(root / "u.csv"))


def test_names_that_cannot_be_written_and_files_that_are_none(image_folder: Folder) -> None:
    root = image_folder(*_names("a/{}.png", 4))
    os.mkfifo(root / "a" / "pipe.png")
    (root / "a" / "gone.png").symlink_to(root / "nowhere.png")
    (Path(os.fsdecode(os.fsencode(root) + b"/a/\xff.png"))).write_bytes((root / "a" / "0.png").read_bytes())
    found = {p.path: p.detail or p.what for p in open_dataset(str(root), size=8).problems}
    assert found["a/pipe.png"] == "not a regular file" and "No such file" in found["a/gone.png"]
    assert found["'a/\\udcff.png'"] == "a name that is not UTF-8"


def test_zips_with_backslashes_and_empty_names(tmp_path: Path, picture: Picture) -> None:
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
        for i in range(4):
            archive.writestr(f"a\\{i}.png", _saved(picture(number=i), "PNG"))
        archive.writestr(zipfile.ZipInfo(""), b"x")
    source = open_dataset(str(tmp_path / "w.zip"), size=8)
    assert source.classes == ("a",) and source.problems == ()


@pytest.mark.filterwarnings("ignore")
def test_flipped_bytes_never_escape_as_another_error(picture: Picture) -> None:
    rng = np.random.default_rng(0)
    kinds = {"PNG": "P", "JPEG": "CMYK", "TIFF": "RGB", "GIF": "P", "BMP": "RGB", "WEBP": "RGB", "PPM": "L"}
    files = [_saved(picture(mode), kind) for kind, mode in kinds.items()]
    for n in range(700):
        blob = bytearray(files[n % len(files)])
        for place in rng.integers(0, len(blob), 6):
            blob[place] = rng.integers(256)
        with contextlib.suppress(Unusable):
            decode(bytes(blob[: rng.integers(1, len(blob) + 1)] if n % 3 == 0 else blob), "x.png", 8, None)


# --- tables as spreadsheets leave them --------------------------------------------------------------------------------------


def _table(root: Path, name: str, lines: list[str], encoding: str = "utf-8") -> str:
    (root / name).write_bytes("\r\n".join(lines).encode(encoding))
    return str(root / name)


def test_a_table_of_excel_on_windows(image_folder: Folder) -> None:
    """Unicode text with tabs, folders with backslashes, a decimal comma, empty columns and rows at the end."""
    root = image_folder(*_names("Bilder/Müller {} (2).png", 20))
    rows = [f"Bilder\\Müller {i} (2).png\t{'ab'[i % 2]} \t61,5\tP{i // 2}\t\t" for i in range(20)]
    path = _table(root, "t.csv", ["Path\tLabel\tAlter\tPatienten-ID\t\t", *rows, "\t\t\t\t\t", ""], "utf-16")
    source = open_dataset(path, size=8, reading=Reading(group="patienten-id"))
    assert source.classes == ("a", "b") and len(source.train) + len(source.test) == 20
    assert not [problem for problem in source.problems if problem.done == "left out"]
    assert "10 in 20 rows" in " ".join(problem.what for problem in source.problems)


def test_findings_name_the_lines_of_the_table(image_folder: Folder) -> None:
    root = image_folder(*_names("{}.png", 4))
    path = _table(root, "t.csv", ["path;label", "0.png;a", "", ";;", "1.png;a", "2.png;", "2.png;b", "3.png;b"])
    lost = [problem for problem in open_dataset(path, size=8).problems if problem.done == "left out"]
    assert [(problem.path, problem.what) for problem in lost] == [("t.csv:6", "no label")]


def test_a_table_without_path_shows_its_columns_one_by_one(image_folder: Folder) -> None:
    path = _table(image_folder("0.png"), "t.csv", ["Datei\tDiagnose\t", "0.png\ta\t"])
    with pytest.raises(DataError, match="got datei,diagnose\\)") as refused:
        open_dataset(path)
    assert "Rename columns" in str(refused.value)


def test_why_no_row_of_a_table_can_be_used(image_folder: Folder) -> None:
    """Remarks about columns are not the reason."""
    path = _table(image_folder("0.png"), "t.csv", ["path,label,age,sex,ward,eye", "7.png,a,1,2,3,4", "8.png,b,1,2,3,4"])
    with pytest.raises(DataError, match=r"holds no usable image \(unreadable: 2 × left out"):
        open_dataset(path)


def test_a_folder_of_images_beside_a_table_names_the_table(image_folder: Folder) -> None:
    root = image_folder(*_names("img/{}.png"))
    with pytest.raises(DataError, match="images of a single class, 'img'") as refused:
        prepare(Simulation("local_only", str(root), 2))
    assert "one folder a class" in str(refused.value)
    _table(root, "labels.csv", ["path,label", "img/0.png,a"])
    with pytest.raises(DataError, match=f"{root / 'labels.csv'} may say what each image shows"):
        prepare(Simulation("local_only", str(root), 2))
