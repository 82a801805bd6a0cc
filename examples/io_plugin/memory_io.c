/* A parameter server's plugin that keeps rows in memory: a place to begin your own.

The configuration names a memory, which lasts as long as the process: instances of one name share its rows. A thread of
each instance answers requests in the order in which they came, so IO_Pull and IO_Push return at once. A value is found
by the name of its table, its id, its column and its part, all compared in full. */
#include "io_plugin.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 1 << 16 };

typedef struct Value {
  struct Value* next;
  char* table;
  int64_t id, col;
  uint32_t part, len;
  void* data;
} Value;

typedef struct Request {
  struct Request* next;
  int is_push;
  IOPullParameter pull;
  IOPushParameter push;
} Request;

typedef struct Memory {
  struct Memory* next;
  char* name;
  pthread_mutex_t lock; /* of the values */
  Value* buckets[BUCKETS];
} Memory;

typedef struct {
  Memory* memory;
  Request *first, **last;
  int closed;
  pthread_mutex_t lock; /* of the requests */
  pthread_cond_t news;
  pthread_t thread;
} Instance;

static Memory* memories = NULL;
static pthread_mutex_t memories_lock = PTHREAD_MUTEX_INITIALIZER;

static void* need(void* memory) {
  if (memory == NULL) {
    fprintf(stderr, "memory_io: there is no memory left\n");
    abort();
  }
  return memory;
}

/* Where the pointer to this value is, or would be. */
static Value** find(Memory* memory, const char* table, int64_t id, int64_t col, uint32_t part) {
  uint64_t hash = ((uint64_t)id * 31 + (uint64_t)col) * 31 + part;
  for (const char* letter = table; *letter; ++letter) {
    hash = hash * 31 + (unsigned char)*letter;
  }
  hash *= 0x9E3779B97F4A7C15u;
  Value** at = &memory->buckets[hash >> 48];
  for (; *at != NULL; at = &(*at)->next) {
    Value* value = *at;
    if (value->id == id && value->col == col && value->part == part && strcmp(value->table, table) == 0) {
      break;
    }
  }
  return at;
}

static void give(Memory* memory, const IOPullParameter* request) {
  for (uint32_t i = 0; i < request->num_ids; ++i) {
    for (uint32_t j = 0; j < request->num_cols; ++j) {
      for (uint32_t part = 0; part < request->num_parts; ++part) {
        Value* value = *find(memory, request->table_name, request->ids[i], request->col_ids[j], part);
        request->on_fetched(
            request->context, i * request->num_cols + j, part, value ? value->data : NULL, value ? value->len : 0);
      }
    }
  }
}

static void keep(Memory* memory, const IOPushParameter* request) {
  uint64_t v = 0;
  for (uint32_t i = 0; i < request->num_ids; ++i) {
    for (uint32_t j = 0; j < request->num_cols; ++j) {
      for (uint32_t k = 0; k < request->num_parts; ++k, ++v) {
        int64_t id = request->ids[i], col = request->col_ids[j];
        uint32_t part = request->part_ids[k];
        uint64_t begin = request->offsets[v], end = request->offsets[v + 1];
        Value** at = find(memory, request->table_name, id, col, part);
        if (*at == NULL) {
          *at = need(calloc(1, sizeof(Value)));
          (*at)->table = need(strdup(request->table_name));
          (*at)->id = id, (*at)->col = col, (*at)->part = part;
        }
        (*at)->len = (uint32_t)(end - begin);
        (*at)->data = need(realloc((*at)->data, end - begin + 1));
        memcpy((*at)->data, (const char*)request->data + begin, end - begin);
      }
    }
  }
}

static void* work(void* argument) {
  Instance* instance = argument;
  for (;;) {
    pthread_mutex_lock(&instance->lock);
    while (instance->first == NULL && !instance->closed) {
      pthread_cond_wait(&instance->news, &instance->lock);
    }
    Request* request = instance->first;
    if (request != NULL && (instance->first = request->next) == NULL) {
      instance->last = &instance->first;
    }
    pthread_mutex_unlock(&instance->lock);
    if (request == NULL) {
      return NULL;
    }
    pthread_mutex_lock(&instance->memory->lock);
    if (request->is_push) {
      keep(instance->memory, &request->push);
    } else {
      give(instance->memory, &request->pull);
    }
    pthread_mutex_unlock(&instance->memory->lock);
    /* From here on the other side may free what the request points to. */
    if (request->is_push) {
      request->push.on_pushed(request->push.context);
    } else {
      request->pull.on_all_fetched(request->pull.context);
    }
    free(request);
  }
}

static void enqueue(Instance* instance, Request* request) {
  pthread_mutex_lock(&instance->lock);
  *instance->last = request;
  instance->last = &request->next;
  pthread_cond_signal(&instance->news);
  pthread_mutex_unlock(&instance->lock);
}

static Memory* named(const char* name) {
  pthread_mutex_lock(&memories_lock);
  Memory* memory = memories;
  while (memory != NULL && strcmp(memory->name, name) != 0) {
    memory = memory->next;
  }
  if (memory == NULL) {
    memory = need(calloc(1, sizeof(Memory)));
    memory->name = need(strdup(name));
    memory->next = memories;
    pthread_mutex_init(&memory->lock, NULL);
    memories = memory;
  }
  pthread_mutex_unlock(&memories_lock);
  return memory;
}

const char* IO_type = "memory-io";

void* IO_Initialize(const char* config) {
  Instance* instance = need(calloc(1, sizeof(Instance)));
  instance->memory = named(config);
  instance->last = &instance->first;
  pthread_mutex_init(&instance->lock, NULL);
  pthread_cond_init(&instance->news, NULL);
  if (pthread_create(&instance->thread, NULL, work, instance) != 0) {
    fprintf(stderr, "memory_io: the system gives no thread\n");
    free(instance);
    return NULL;
  }
  return instance;
}

void IO_Finalize(void* argument) {
  Instance* instance = argument;
  pthread_mutex_lock(&instance->lock);
  instance->closed = 1;
  pthread_cond_signal(&instance->news);
  pthread_mutex_unlock(&instance->lock);
  pthread_join(instance->thread, NULL);
  pthread_cond_destroy(&instance->news);
  pthread_mutex_destroy(&instance->lock);
  free(instance);
}

void IO_Pull(void* instance, IOPullParameter pull) {
  Request* request = need(calloc(1, sizeof(Request)));
  request->pull = pull;
  enqueue(instance, request);
}

void IO_Push(void* instance, IOPushParameter push) {
  Request* request = need(calloc(1, sizeof(Request)));
  request->push = push;
  request->is_push = 1;
  enqueue(instance, request);
}
