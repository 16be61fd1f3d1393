"""What pyproject.toml can't say: the project's address, which its owner sets, e.g. LM_REPOSITORY=https://HOST/OWNER/lm."""

import os

from setuptools import setup

repository = os.environ.get("LM_REPOSITORY", "").rstrip("/")
setup(project_urls={"Source": repository, "Issues": f"{repository}/issues"} if repository else {})
