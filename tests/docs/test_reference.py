"""The reference of settings and metrics is what the code says, and names every one of them."""

from __future__ import annotations

import re

from scripts.write_reference import FOLDER, differing, texts
from services.balancer.settings import Settings
from tests.deploy.test_files import exported_names
