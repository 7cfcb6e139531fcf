"""Makes python/ importable in the virtual environment that runs this, by a .pth file in its site-packages."""

import os
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "python"
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))

# Relative, so that the link survives a move of the checkout.
(SITE_PACKAGES / "forebay.pth").write_text(os.path.relpath(SOURCE, SITE_PACKAGES) + "\n")
