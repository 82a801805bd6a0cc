/* The interface between a parameter server's plugin and the program that loads it.

A plugin is a shared library that has the five names at the end. The structures are passed by value; everything that
they point to stays where it is until the plugin has called on_all_fetched or on_pushed with the request's context, and
not a moment longer. The callbacks may be called from any thread. A context is a token: give it back, do not read it. */
#ifndef IO_PLUGIN_H
#define IO_PLUGIN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Wanted: of each of num_ids rows and num_cols columns (there is one, 0) the parts 0 to num_parts - 1: the row's
   weights, then its optimizer's state. */
typedef struct {
  const char* table_name;
  uint32_t num_cols;
  uint32_t num_ids;
  const int64_t* col_ids;
  const int64_t* ids;
  uint32_t num_parts;
  void* context;
  /* A value: offset is row * num_cols + column; data_len is in bytes, and 0 where there is no value. The data are
     copied before the call returns. */
  void (*on_fetched)(void* context, uint32_t offset, uint32_t part, void* data, uint32_t data_len);
  /* Once, behind the last value. */
  void (*on_all_fetched)(void* context);
} IOPullParameter;

/* To keep: value v, counted [row][column][part], is the bytes data[offsets[v]] to data[offsets[v + 1]], and its part
   is part_ids[v % num_parts]. */
typedef struct {
  const char* table_name;
  uint32_t num_cols;
  uint32_t num_ids;
  const int64_t* col_ids;
  const int64_t* ids;
  uint32_t num_parts;
  const uint32_t* part_ids;
  uint32_t num_offsets;
  const uint64_t* offsets;
  const void* data;
  void* context;
  /* Once, when all values are kept. */
  void (*on_pushed)(void* context);
} IOPushParameter;

/* The scheme of the URLs that name this plugin. */
extern const char* IO_type;

/* config is what stands behind "scheme://". NULL says that it failed. */
void* IO_Initialize(const char* config);

/* Called once, with no request open but those that were never answered. */
void IO_Finalize(void* instance);

void IO_Pull(void* instance, IOPullParameter request);

void IO_Push(void* instance, IOPushParameter request);

#ifdef __cplusplus
}
#endif

#endif
