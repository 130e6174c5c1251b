"""Is every file of the package in the wheel? `wheel_files.py SRC WHEEL`"""

import sys
import zipfile
from pathlib import Path

source, wheel = Path(sys.argv[1]), sys.argv[2]
files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
missing = sorted(name for name in files - set(zipfile.ZipFile(wheel).namelist()) if ".egg-info" not in name)
sys.exit(f"missing in the wheel: {', '.join(missing)}") if missing else print(f"all {len(files)} files are in it")
