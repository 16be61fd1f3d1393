# CPU:  docker build -t lm .
# GPU:  docker build -t lm --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 --build-arg CONSTRAINTS= .
# An empty CONSTRAINTS lets pip take the newest torch, whose default Linux build brings its own CUDA libraries.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG CONSTRAINTS=constraints.txt
# g++ for torch.compile, git for the commit in environment.json; python3-venv where the base has no Python of its own.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git \
    && (command -v python3 > /dev/null || apt-get install -y --no-install-recommends python3 python3-venv python3-dev) \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home lm
WORKDIR /home/lm/lm
COPY --chown=lm . .
RUN chown lm .
USER lm
# The same steps as on any machine.
RUN LM_CONSTRAINTS="${CONSTRAINTS}" bash -c 'source scripts/setup.sh'
ENV PATH=/home/lm/lm/.venv/bin:$PATH LM_CONSTRAINTS=${CONSTRAINTS}
CMD ["bash", "scripts/quickstart.sh"]
