"""Several training runs in one process (or under torchrun, in one group of processes), which imports torch once.

python tests/jobs.py FILE, of JSON such as [["tests/tiny.yaml", "name=a"], ["tests/tiny.yaml", "name=a", "resume=auto"]]
"""

import json
import sys
from pathlib import Path

from lm.config.load import load
from lm.training.train import train

if __name__ == "__main__":
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        status = train(load(arguments))
        if status:
            sys.exit(status)
