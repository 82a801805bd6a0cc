"""Makes the checkpoints in tests/foreign/tfra, by tensorflow-recommenders-addons 0.8.1 on tensorflow-cpu 2.16.2.

    python -m venv tf && tf/bin/pip install tensorflow-cpu==2.16.2 tf-keras==2.16.0 typeguard
    tf/bin/pip install --no-deps tensorflow-recommenders-addons==0.8.1
    CUDA_VISIBLE_DEVICES= tf/bin/python tests/foreign/make_tfra.py tests/foreign/tfra

Each folder has a checkpoint and `expected.npz`: the keys and values of each table, as TFRA's own `export` gives them.
With a second folder, the script loads the files in it, which oneemb has written, and prints the rows of each table.
"""

import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
import tf_keras
from tensorflow.python.ops import variable_scope
from tensorflow_recommenders_addons import dynamic_embedding as de

CPU = "/CPU:0"


def make_table(name, dim, devices=(CPU,), saver=None, **options):
    creator = de.CuckooHashTableCreator(saver=saver) if saver else None
    return de.get_variable(
        name, dim=dim, devices=list(devices), kv_creator=creator,
        initializer=tf.keras.initializers.RandomNormal(seed=1), **options,
    )  # fmt: skip


def step(table, optimizer, ids):
    with tf.GradientTape() as tape:
        found = de.embedding_lookup(table, tf.constant(ids, tf.int64), name="lookup", return_trainable=True)
        weights, trainable = found
        tape.watch(trainable)
        loss = tf.reduce_sum(tf.sin(weights) * tf.range(1.0, 1.0 + table.dim))
    optimizer.apply_gradients([(tape.gradient(loss, trainable), trainable)])


def exported(tables):
    found = {}
    for table in tables:
        for what, array in zip(("keys", "values"), table.export(), strict=True):
            found[f"{table.name}:{what}"] = np.concatenate([one.numpy() for one in array]) if isinstance(
                array, list) else array.numpy()  # fmt: skip
    return found


def slots(table):
    variables = variable_scope._get_default_variable_store()._vars
    return [one for name, one in variables.items() if name.startswith(f"{table.name}/lookup/")]


def save(folder, make_optimizer, checkpoint, saver=None, names=("films", "users/long"), **options):
    tf.random.set_seed(3)
    films = make_table(names[0], 4, saver=saver, **options)
    users = make_table(names[1], 2, (CPU, CPU), saver=saver)
    optimizer = de.DynamicEmbeddingOptimizer(make_optimizer())
    step(films, optimizer, [7, -1, 2**60, 11])
    step(users, optimizer, [3, 4, 5, -(2**63), 2**63 - 1])
    step(films, optimizer, [7, 5, 5])
    films.upsert(tf.constant([99], tf.int64), tf.fill([1, 4], 0.25))  # a row without optimizer state
    tables = [films, users, *slots(films), *slots(users)]
    if films.restrict_policy is not None:
        films.restrict_policy.apply_update(tf.constant([7, 7, 5, 11], tf.int64))
        tables.append(films.restrict_policy.status)
    more = {"status": films.restrict_policy.status} if films.restrict_policy is not None else {}
    dense = tf.Variable([1.0, 2.0])
    checkpoint(films=films, users=users, optimizer=optimizer, dense=dense, **more).save(f"{folder}/model")
    np.savez(f"{folder}/expected.npz", **exported(tables))


def save_by_name(folder):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        films = make_table("films", 4)
        slot = make_table("films/lookup/accumulator", 4)
        keys = tf.constant([7, -1, 2**60], tf.int64)
        values = tf.reshape(tf.range(12.0), (3, 4))
        session.run(tf.compat.v1.global_variables_initializer())
        session.run([films.upsert(keys, values), slot.upsert(keys, values + 0.5)])
        saver = tf.compat.v1.train.Saver([films.tables[0].saveable, slot.tables[0].saveable])
        saver.save(session, f"{folder}/model", global_step=12, write_meta_graph=False)
        arrays = session.run([films.export(), slot.export()])
    found = {}
    for name, pair in zip(("films", "films/lookup/accumulator"), arrays, strict=True):
        for what, array in zip(("keys", "values"), pair, strict=True):
            found[f"{name}:{what}"] = np.concatenate(array) if isinstance(array, list) else array
    np.savez(f"{folder}/expected.npz", **found)


def show(folder, name, dim):
    table = make_table(name, dim, (CPU, CPU), saver=de.FileSystemSaver())
    table.load_from_file_system_with_restore_function(folder)
    keys, values = (np.concatenate(one) if isinstance(one, list) else one.numpy() for one in table.export())
    for key, value in sorted(zip(keys.tolist(), values.tolist(), strict=True)):
        print(name, key, *value)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        show(sys.argv[1], sys.argv[2], int(sys.argv[3]))
        raise SystemExit
    out = sys.argv[1]
    for name in ("adam", "files", "adagrad", "named"):
        os.makedirs(f"{out}/{name}", exist_ok=True)
    save(f"{out}/adam", lambda: tf_keras.optimizers.legacy.Adam(0.1), tf.train.Checkpoint)
    save(f"{out}/files", lambda: tf_keras.optimizers.legacy.Adam(0.1), de.train.Checkpoint, de.FileSystemSaver(),
         names=("movies", "people/long"))  # fmt: skip
    save(f"{out}/adagrad", lambda: tf_keras.optimizers.legacy.Adagrad(0.1), tf.train.Checkpoint,
         names=("items", "shops"), restrict_policy=de.FrequencyRestrictPolicy)  # fmt: skip
    save_by_name(f"{out}/named")
