/* A parameter server's plugin that keeps rows in memory: a place to begin your own.

One thread answers requests in the order in which they came, so IO_Pull and IO_Push return at once. A value is found by
the name of its table, its id, its column and its part, all compared in full. */
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

typedef struct {
  Value* buckets[BUCKETS];
  Request *first, **last;
  int closed;
  pthread_mutex_t lock;
  pthread_cond_t news;
  pthread_t thread;
} Memory;

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

static void answer_pull(Memory* memory, const IOPullParameter* request) {
  for (uint32_t i = 0; i < request->num_ids; ++i) {
    for (uint32_t j = 0; j < request->num_cols; ++j) {
      for (uint32_t part = 0; part < request->num_parts; ++part) {
        Value* value = *find(memory, request->table_name, request->ids[i], request->col_ids[j], part);
        request->on_fetched(
            request->context, i * request->num_cols + j, part, value ? value->data : NULL, value ? value->len : 0);
      }
    }
  }
  request->on_all_fetched(request->context);
}

static void answer_push(Memory* memory, const IOPushParameter* request) {
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
  request->on_pushed(request->context);
}

static void* work(void* instance) {
  Memory* memory = instance;
  for (;;) {
    pthread_mutex_lock(&memory->lock);
    while (memory->first == NULL && !memory->closed) {
      pthread_cond_wait(&memory->news, &memory->lock);
    }
    Request* request = memory->first;
    if (request != NULL && (memory->first = request->next) == NULL) {
      memory->last = &memory->first;
    }
    pthread_mutex_unlock(&memory->lock);
    if (request == NULL) {
      return NULL;
    }
    if (request->is_push) {
      answer_push(memory, &request->push);
    } else {
      answer_pull(memory, &request->pull);
    }
    free(request);
  }
}

static void enqueue(Memory* memory, Request* request) {
  pthread_mutex_lock(&memory->lock);
  *memory->last = request;
  memory->last = &request->next;
  pthread_cond_signal(&memory->news);
  pthread_mutex_unlock(&memory->lock);
}

const char* IO_type = "memory-io";

void* IO_Initialize(const char* config) {
  (void)config; /* Every instance has a memory of its own. */
  Memory* memory = calloc(1, sizeof(Memory));
  if (memory == NULL) {
    return NULL;
  }
  memory->last = &memory->first;
  pthread_mutex_init(&memory->lock, NULL);
  pthread_cond_init(&memory->news, NULL);
  if (pthread_create(&memory->thread, NULL, work, memory) != 0) {
    fprintf(stderr, "memory_io: the system gives no thread\n");
    free(memory);
    return NULL;
  }
  return memory;
}

void IO_Finalize(void* instance) {
  Memory* memory = instance;
  pthread_mutex_lock(&memory->lock);
  memory->closed = 1;
  pthread_cond_signal(&memory->news);
  pthread_mutex_unlock(&memory->lock);
  pthread_join(memory->thread, NULL);
  for (int b = 0; b < BUCKETS; ++b) {
    for (Value *value = memory->buckets[b], *next; value != NULL; value = next) {
      next = value->next;
      free(value->table);
      free(value->data);
      free(value);
    }
  }
  pthread_cond_destroy(&memory->news);
  pthread_mutex_destroy(&memory->lock);
  free(memory);
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
