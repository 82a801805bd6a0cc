/* A plugin that does what a plugin must not: which, the configuration says. It keeps one row of two parts, [n], as
   weights of ids: value k of part p of an id is id + 100 * p + k. */
#include "../../../examples/io_plugin/io_plugin.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 3, THREADS = 4 };

typedef struct {
  char mode[64];
  IOPullParameter pull;
  IOPushParameter push;
} Hostile;

/* Read and called by tests. */
int initialized = 0, finalized = 0, asked = 0;
int64_t seen_ids[4];
char seen_table[64];
sem_t go, gone;

__attribute__((constructor)) static void begin(void) {
  sem_init(&go, 0, 0);
  sem_init(&gone, 0, 0);
}

void let_go(void) { sem_post(&go); }
void wait_until_gone(void) { sem_wait(&gone); }

#ifndef NO_TYPE
#ifdef NULL_TYPE
const char* IO_type = NULL;
#elif defined(BAD_TYPE)
const char* IO_type = "no scheme://";
#else
const char* IO_type = "hostile";
#endif
#endif

#ifndef NO_FUNCTIONS
void* IO_Initialize(const char* config) {
  initialized++;
  if (strcmp(config, "null") == 0) {
    return NULL;
  }
  if (strcmp(config, "stuck-initialize") == 0) {
    sem_wait(&go);
  }
  Hostile* hostile = calloc(1, sizeof(Hostile));
  strncpy(hostile->mode, config, sizeof(hostile->mode) - 1);
  return hostile;
}

void IO_Finalize(void* instance) {
  finalized++;
  free(instance);
}

static void give(const IOPullParameter* pull, uint32_t first, uint32_t step, uint32_t floats) {
  for (uint32_t i = first; i < pull->num_ids; i += step) {
    for (uint32_t p = 0; p < pull->num_parts; ++p) {
      float row[WIDTH + 1];
      for (int k = 0; k <= WIDTH; ++k) {
        row[k] = (float)(pull->ids[i] + 100 * p + k);
      }
      pull->on_fetched(pull->context, i, p, row, floats * sizeof(float));
    }
  }
}

static void* late(void* instance) {
  Hostile* hostile = instance;
  IOPullParameter pull = hostile->pull;
  sem_wait(&go);
  /* What the request pointed to is still there. */
  strncpy(seen_table, pull.table_name, sizeof(seen_table) - 1);
  for (uint32_t i = 0; i < pull.num_ids && i < 4; ++i) {
    seen_ids[i] = pull.ids[i];
  }
  give(&pull, 0, 1, WIDTH);
  pull.on_all_fetched(pull.context);
  sem_post(&gone);
  return NULL;
}

static void* late_push(void* instance) {
  Hostile* hostile = instance;
  IOPushParameter push = hostile->push;
  sem_wait(&go);
  const float* data = push.data;
  for (uint32_t i = 0; i < push.num_ids && i < 4; ++i) {
    seen_ids[i] = push.ids[i] * 1000 + (int64_t)data[push.offsets[i] / sizeof(float)];
  }
  push.on_pushed(push.context);
  sem_post(&gone);
  return NULL;
}

typedef struct {
  IOPullParameter* pull;
  uint32_t first;
} Share;

static void* give_share(void* argument) {
  Share* share = argument;
  give(share->pull, share->first, THREADS, WIDTH);
  return NULL;
}

static void* twice_later(void* instance) {
  IOPullParameter pull = ((Hostile*)instance)->pull;
  sem_wait(&go);
  pull.on_all_fetched(pull.context);
  float wrong[WIDTH] = {666, 666, 666};
  pull.on_fetched(pull.context, 0, 0, wrong, sizeof(wrong));
  pull.on_all_fetched(pull.context);
  sem_post(&gone);
  return NULL;
}

static void beside(void* (*run)(void*), void* argument) {
  pthread_t thread;
  pthread_create(&thread, NULL, run, argument);
  pthread_detach(thread);
}

void IO_Pull(void* instance, IOPullParameter pull) {
  Hostile* hostile = instance;
  const char* mode = hostile->mode;
  float row[WIDTH] = {1, 2, 3};
  asked++;
  hostile->pull = pull;
  if (strcmp(mode, "never") == 0) {
    return;
  }
  if (strcmp(mode, "late") == 0 && asked == 1) {
    beside(late, hostile);
    return;
  }
  if (strcmp(mode, "stuck") == 0) {
    sem_wait(&go);
  }
  if (strcmp(mode, "short") == 0) {
    give(&pull, 0, 1, WIDTH - 1);
  } else if (strcmp(mode, "long") == 0) {
    give(&pull, 0, 1, WIDTH + 1);
  } else if (strcmp(mode, "odd") == 0) {
    pull.on_fetched(pull.context, 0, 0, row, 7);
  } else if (strcmp(mode, "offset") == 0) {
    pull.on_fetched(pull.context, pull.num_ids, 0, row, sizeof(row));
  } else if (strcmp(mode, "huge-offset") == 0) {
    pull.on_fetched(pull.context, UINT32_MAX, 0, row, sizeof(row));
  } else if (strcmp(mode, "part") == 0) {
    pull.on_fetched(pull.context, 0, pull.num_parts, row, sizeof(row));
  } else if (strcmp(mode, "null-data") == 0) {
    pull.on_fetched(pull.context, 0, 0, NULL, sizeof(row));
  } else if (strcmp(mode, "same-twice") == 0) {
    give(&pull, 0, 1, WIDTH);
    give(&pull, 0, 1, WIDTH);
  } else if (strcmp(mode, "other-twice") == 0) {
    give(&pull, 0, 1, WIDTH);
    pull.on_fetched(pull.context, 1, 0, row, sizeof(row));
  } else if (strcmp(mode, "then-missing") == 0) {
    give(&pull, 0, 1, WIDTH);
    pull.on_fetched(pull.context, 0, 1, NULL, 0);
  } else if (strcmp(mode, "some") == 0) {
    give(&pull, 0, 2, WIDTH);
  } else if (strcmp(mode, "no-state") == 0) {
    for (uint32_t i = 0; i < pull.num_ids; ++i) {
      pull.on_fetched(pull.context, i, 0, NULL, 0);
      pull.on_fetched(pull.context, i, 1, row, sizeof(row));
    }
  } else if (strcmp(mode, "threads") == 0) {
    pthread_t threads[THREADS];
    Share shares[THREADS];
    for (int t = 0; t < THREADS; ++t) {
      shares[t] = (Share){&pull, (uint32_t)t};
      pthread_create(&threads[t], NULL, give_share, &shares[t]);
    }
    for (int t = 0; t < THREADS; ++t) {
      pthread_join(threads[t], NULL);
    }
  } else if (strcmp(mode, "other-context") == 0) {
    pull.on_fetched((void*)0x7fffffff, 0, 0, row, sizeof(row));
    pull.on_all_fetched(NULL);
    pull.on_all_fetched((void*)0x7fffffff);
  } else {
    give(&pull, 0, 1, WIDTH);
  }
  pull.on_all_fetched(pull.context);
  if (strcmp(mode, "completes-twice") == 0) {
    float wrong[WIDTH] = {666, 666, 666};
    pull.on_fetched(pull.context, 0, 0, wrong, sizeof(wrong));
    pull.on_all_fetched(pull.context);
    beside(twice_later, hostile);
  }
}

void IO_Push(void* instance, IOPushParameter push) {
  Hostile* hostile = instance;
  asked++;
  hostile->push = push;
  if (strcmp(hostile->mode, "late") == 0) {
    beside(late_push, hostile);
  } else if (strcmp(hostile->mode, "never") != 0) {
    push.on_pushed(push.context);
    if (strcmp(hostile->mode, "completes-twice") == 0) {
      push.on_pushed(push.context);
    }
  }
}
#endif
