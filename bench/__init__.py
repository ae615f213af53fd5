"""Measurements; nothing here is asserted, and no plan that was made before is taken for a measured one."""

import os

os.environ["OPTPIPE_CACHE"] = ""
