"""Text from the exported model of a job file with a gpt:
hpcsgd export runs/gpt_wikitext2
python examples/sample_gpt.py runs/gpt_wikitext2 "The river "
"""

import sys
from pathlib import Path

import torch

from hpcsgd import models
from hpcsgd.config.schema import load
from hpcsgd.data.corpus import tokenizer_of_file
from hpcsgd.models.weights import load_into

run, prompt = Path(sys.argv[1]), sys.argv[2]
job = load(run / "job.toml")
model = models.build(job.model.name, job.model.arguments).eval()
load_into(model, run / "model.safetensors")
tokenizer = tokenizer_of_file(job.data.path)
tokens = torch.from_numpy(tokenizer.encode([prompt.encode()])[0].astype("int64"))
with torch.no_grad():
    for _ in range(300):
        scores = model(tokens[None, -job.data.arguments["bptt"] :])[0, -1]
        tokens = torch.cat([tokens, (scores / 0.8).softmax(0).multinomial(1)])
print(tokenizer.decode(tokens.tolist()))
