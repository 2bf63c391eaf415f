"""Lets these tests use the builders of the tests above them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
