"""The tools are programs, not a package: their tests import them from their folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
