#!/bin/bash
# Writes a job, then starts it.
NODES=2
cat > job.sh <<JOB
#!/bin/bash
torchrun --nnodes $NODES --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 \
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size \$MICRO --train-iters 5 --lr 1e-3 \
    --mock-data --vocab-size 100
JOB
export MICRO=4
bash job.sh
