"""From a checkpoint's shards to an FP8 checkpoint: headers decide, shards stream."""
