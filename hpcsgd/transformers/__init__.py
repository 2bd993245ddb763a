"""`Trainer` and `TrainerMixin`: Hugging Face's `Trainer` with the methods of hpcsgd.

import hpcsgd.transformers

topology = hpcsgd.transformers.init(groups=2)     # before TrainingArguments
method = hpcsgd.hierarchical(sync_every=8)
trainer = hpcsgd.transformers.Trainer(model, args, topology=topology, method=method)

They need the packages `transformers` and `accelerate`: `pip install "hpcsgd[hf]"`. `import hpcsgd` does not
import them.
"""

from __future__ import annotations

from hpcsgd.hugging_face.installed import require

require("hpcsgd.transformers", "transformers", "accelerate")

from hpcsgd.transformers.start import init as init  # noqa: E402
from hpcsgd.transformers.trainer import Trainer as Trainer  # noqa: E402
from hpcsgd.transformers.trainer import TrainerMixin as TrainerMixin  # noqa: E402
