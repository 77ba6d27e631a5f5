"""A version as files for other tools: safetensors, folders of Hugging Face's libraries; in a local folder or an object store."""
