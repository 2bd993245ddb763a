"""`Accelerator`: training loops written for Hugging Face's Accelerate, with the methods of hpcsgd.

import hpcsgd.accelerate

accelerator = hpcsgd.accelerate.Accelerator(groups=2, method=hpcsgd.hierarchical(sync_every=8))

It needs the package `accelerate`: `pip install "hpcsgd[hf]"`. `import hpcsgd` does not import it.
"""

from __future__ import annotations

from hpcsgd.hugging_face.installed import require

require("hpcsgd.accelerate", "accelerate")

from hpcsgd.accelerate.accelerator import Accelerator as Accelerator  # noqa: E402
