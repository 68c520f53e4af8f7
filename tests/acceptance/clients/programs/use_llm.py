"""The `llm` command, told of the server by its file of models."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_, generate, _, *_ = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    entry = {"model_id": "arithmetic", "model_name": "arithmetic", "api_base": f"{generate}/v1"}
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps([entry]))
    command = [Path(sys.executable).with_name("llm"), "-m", "arithmetic", "--key", "none", "What is 2 plus 3?"]
    said = {
        name: subprocess.run(
            [*command, *more], capture_output=True, text=True, check=True, env=os.environ | {"LLM_USER_PATH": folder}
        ).stdout.strip()
        for name, more in (("streamed", ()), ("answer", ("--no-stream",)))
    }
print(json.dumps(said))
