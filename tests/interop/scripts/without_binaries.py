"""Prepares the import of torchvision and datasets on a machine without their binary parts; import it before both."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

# torchvision's file on shapes needs its compiled operators, which a CPU build of torch does not load.
sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
sys.path.append(str(Path(__file__).parent / "sounds"))
