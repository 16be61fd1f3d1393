# CPU:  docker build -t lm --build-arg COMMIT=$(git rev-parse HEAD) .
# GPU:  docker build -t lm --build-arg COMMIT=$(git rev-parse HEAD) --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 .
# Both have the versions of constraints.txt. On the package index torch for Linux is the CUDA build, which brings its own CUDA libraries and runs
# on a CPU as well; an index of CPU builds makes a smaller image: --build-arg INDEX=URL.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG CONSTRAINTS=constraints.txt
ARG INDEX=
# g++ for torch.compile and long evaluations; python3-venv where the base has no Python of its own.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && (command -v python3 > /dev/null || apt-get install -y --no-install-recommends python3 python3-venv python3-dev) \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home lm
WORKDIR /home/lm/lm
COPY --chown=lm . .
RUN chown lm .
USER lm
# The same steps as on any machine.
RUN PIP_EXTRA_INDEX_URL="${INDEX}" LM_CONSTRAINTS="${CONSTRAINTS}" bash -c 'source scripts/setup.sh'
ARG COMMIT=
ENV PATH=/home/lm/lm/.venv/bin:$PATH LM_CONSTRAINTS=${CONSTRAINTS} LM_COMMIT=${COMMIT}
CMD ["bash", "scripts/quickstart.sh"]
