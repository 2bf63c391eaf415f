"""The frameworks whose configs and logs are read; a new one is a module beside this one and an entry here."""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.formats.frameworks.areal import Areal
from trimtab.formats.frameworks.common import FrameworkConfig
from trimtab.formats.frameworks.hydra_config import ConfigReader
from trimtab.formats.frameworks.nemo_rl import NemoRl
from trimtab.formats.frameworks.openrlhf import OpenRlhf
from trimtab.formats.frameworks.prime_rl import PrimeRl
from trimtab.formats.frameworks.rlinf import Rlinf
from trimtab.formats.frameworks.roll import Roll
from trimtab.formats.frameworks.skyrl import SkyRl
from trimtab.formats.frameworks.slime import Slime
from trimtab.formats.frameworks.trl import Trl
from trimtab.formats.frameworks.verl import Verl

# In the order in which a config is compared with them.
FRAMEWORKS: Mapping[str, type[FrameworkConfig]] = {
    kind.NAME: kind for kind in (Rlinf, Verl, NemoRl, OpenRlhf, Areal, Roll, Trl, Slime, SkyRl, PrimeRl)
}


def framework_of(reader: ConfigReader) -> type[FrameworkConfig] | None:
    return next((kind for kind in FRAMEWORKS.values() if kind.matches(reader)), None)


def titles() -> str:
    """The frameworks' names, for messages."""
    *first, last = (kind.TITLE for kind in FRAMEWORKS.values())
    return f"{', '.join(first)} and {last}"
