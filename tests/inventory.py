"""Write tests/inventory.yaml; the same as python scripts/generate.py --no-results."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "generate.py"
sys.exit(subprocess.run([sys.executable, str(SCRIPT), "--no-results"], check=False).returncode)
