# zero3.json: `zeroaccel config template zero_stage3_bf16 -o zero3.json`
zeroaccel launch --num_processes 8 -m swift.cli.sft \
  --deepspeed zero3.json \
  --model meta-llama/Llama-3.1-8B \
  --dataset AI-ModelScope/alpaca-gpt4-data-en \
  --train_type full \
  --torch_dtype bfloat16 \
  --per_device_train_batch_size 1 \
  --gradient_accumulation_steps 8 \
  --learning_rate 1e-5 \
  --max_length 2048 \
  --output_dir trained
