"""What words attend to: sentences, translations and captions."""
