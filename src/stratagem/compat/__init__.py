"""The seed pages' historical names, for people who come from tf.distribute."""
