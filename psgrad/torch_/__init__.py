"""What psgrad takes from torch that torch does not promise to keep: every private name, and nothing else.

The names are listed in `versions.py` and checked when this package is imported, before anything uses them.
"""

from . import versions as versions
