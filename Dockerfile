# Speedtronic in a container, from the wheel that this clone makes. Arguments choose Python, and where PyTorch comes from:
#     docker build -t speedtronic .
#     docker build -t speedtronic --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .   # without CUDA
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://pypi.org/simple
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt --extra-index-url "${TORCH_INDEX}" /tmp/wheels/*.whl \
    && rm -r /tmp/wheels \
    && useradd --create-home --uid 1000 trainer \
    && mkdir -p /training/runs \
    && chown -R 1000 /training
USER 1000
WORKDIR /training
COPY --chown=1000 examples examples
ENTRYPOINT ["speedtronic"]
CMD ["--help"]
