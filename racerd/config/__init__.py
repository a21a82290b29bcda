"""Settings: declared once, read from flags, variables and a TOML file, validated together.

Layer: config. `declarations` is the table that parsing, help, `check-config` and the docs derive
from; `load_settings` applies it; `diff` says what a reload may change. Nothing is started here.
"""

from racerd.config.caches import CacheSettings
from racerd.config.change import SettingsChange, diff
from racerd.config.load import Loaded, load_settings
from racerd.config.origin_options import OriginOptions, Secret
from racerd.config.settings import DiskSettings, Settings

__all__ = [
    "CacheSettings",
    "DiskSettings",
    "Loaded",
    "OriginOptions",
    "Secret",
    "Settings",
    "SettingsChange",
    "diff",
    "load_settings",
]
