# fp8calib on a CPU: docker build --file scripts/cpu.Dockerfile --tag fp8calib .
FROM python:3.12-slim
# Options of pip for torch alone, such as --index-url and the index of its CPU builds.
ARG TORCH_OPTIONS=""
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt $TORCH_OPTIONS torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY fp8calib ./fp8calib
COPY recipes ./recipes
RUN pip install --no-cache-dir --constraint constraints.txt .
WORKDIR /models
ENV HF_HOME=/models/.cache/huggingface
USER 1000:1000
ENTRYPOINT ["fp8calib"]
CMD ["--help"]
