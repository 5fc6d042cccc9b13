"""Imported first by the fork server, which only imports: no garbage is collected meanwhile.

`system.imports` says what that saves. Each rank that it forks collects again.
"""

import gc

gc.disable()
